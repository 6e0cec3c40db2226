"""What may end an answer, and what may not yet; what the sampler sees of the prompt and of the mask."""

import math
from typing import Any

import pytest

from legato.core.events import FinishReason
from legato.engine.sequence import SequenceEnd, SequenceOutput
from tests.fakes import START, FakeTokens, FixedDecoder, make_engine, make_sequence, run_all, say, scripted


def end_of(output: SequenceOutput) -> SequenceEnd:
    assert output.end is not None
    return output.end


@pytest.mark.parametrize(
    ("min_tokens", "text", "tokens"), [(0, "a", 2), (1, "a", 2), (2, "a", 2), (3, "aba", 4), (4, "aba", 4)]
)
def test_a_stop_string_counts_from_the_token_that_makes_min_tokens_on(min_tokens: int, text: str, tokens: int) -> None:
    deltas, last = say([b"a", b"b", b"a", b"b"], stop=["b"], min_tokens=min_tokens)
    assert "".join(deltas) == text
    end = end_of(last)
    assert (end.reason, end.stop_sequence, end.usage.completion_tokens) == (FinishReason.STOP, "b", tokens)


def test_a_stop_string_that_was_passed_before_min_tokens_does_not_end_the_answer_later() -> None:
    deltas, last = say([b"a", b"b", b"c", b"d"], stop=["b"], min_tokens=3)
    assert "".join(deltas) == "abcd"
    assert end_of(last).stop_sequence is None


def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    _, last = say([b"a", b"b", b"c"], stop_token_ids=[2], min_tokens=3, max_tokens=9)
    end = end_of(last)
    assert end.usage.completion_tokens >= 3
    assert end.stop_sequence == 2  # and afterwards it ends the run


def test_ignore_eos_leaves_the_stop_ids_in_force() -> None:
    deltas, last = say([b"a", b"b", b"c"], stop_token_ids=[3], ignore_eos=True, max_tokens=9)
    assert "".join(deltas) == "ab"
    assert (end_of(last).reason, end_of(last).stop_sequence) == (FinishReason.STOP, 3)


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1, "top_k": 1}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("penalty", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repeat_penalty": 2.0}])
def test_penalties_see_the_prompt(more: dict[str, Any], penalty: dict[str, Any]) -> None:
    tokens = FakeTokens([b"a", b"b", b"c", b"d"], ends=set())

    def first_token(prompt: list[int]) -> str:
        seq = make_sequence(prompt, max_tokens=1, **more, **penalty)
        return "".join(output.text for output in run_all(make_engine(FixedDecoder([0, 1, 3.8, 4]), tokens), seq))

    assert first_token([0, 1]) == "d"
    assert first_token([0, 3, 1]) == "c"


def test_logprobs_are_taken_before_the_end_tokens_are_masked() -> None:
    tokens = FakeTokens([b"a", b"b", b""], ends={2})
    seq = make_sequence([START], temperature=0, max_tokens=3, ignore_eos=True, logprobs=3)
    outputs = run_all(make_engine(FixedDecoder([1, 2, 3]), tokens), seq)
    entries = [entry for output in outputs for entry in output.logprobs]
    assert [entry.chosen.token_id for entry in entries] == [1, 1, 1]
    for entry in entries:
        assert [top.token_id for top in entry.top] == [2, 1, 0]
        assert sum(math.exp(top.logprob) for top in entry.top) == pytest.approx(1, abs=1e-5)
        assert all(math.isfinite(top.logprob) for top in entry.top)


def test_text_that_was_held_to_the_end_is_timed_as_text() -> None:
    deltas, last = say([b"a"], stop=["ab"])
    assert deltas == ["a"]
    assert end_of(last).timing.ttft_s is not None


def test_a_held_tail_is_timed_when_it_comes_out() -> None:
    decoder, tokens = scripted([b"a", b"b"])
    seq = make_sequence([START], temperature=0, stop=["abc"])
    clock_of = iter(range(1000))
    engine = make_engine(decoder, tokens)
    engine.clock = lambda: float(next(clock_of))
    timing = end_of(run_all(engine, seq)[-1]).timing
    assert timing.ttft_s is not None
    assert seq.clock.last_token is not None
    assert timing.ttft_s > seq.clock.last_token
