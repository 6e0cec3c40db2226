"""The step, by invariants, on decoders whose logits follow from everything a slot holds."""

import random
from typing import Any

import pytest

from legato.core.errors import EngineError, RequestError
from legato.core.events import FinishReason
from legato.core.request import make_options
from legato.engine.config import EngineConfig
from legato.engine.sequence import Sequence, SequenceOutput, SequenceStatus
from tests.fakes import (
    START,
    FakeClock,
    FakeTokens,
    FixedDecoder,
    HashDecoder,
    ScriptedDecoder,
    make_engine,
    make_sequence,
    run_all,
    say,
    scripted,
)

VOCAB = 40
TOKENS = FakeTokens([bytes([65 + i % 26]) for i in range(VOCAB)], ends={VOCAB - 1})


def hash_decoder(slots: int = 4, context: int = 64) -> HashDecoder:
    return HashDecoder(VOCAB, num_slots=slots, context_length=context)


def texts(outputs: list[SequenceOutput]) -> dict[tuple[str, int], str]:
    joined: dict[tuple[str, int], str] = {}
    for output in outputs:
        key = (output.request_id, output.index)
        joined[key] = joined.get(key, "") + output.text
    return joined


def alone(prompt: list[int], **options: Any) -> str:
    outputs = run_all(make_engine(hash_decoder(), TOKENS), make_sequence(prompt, **options))
    return "".join(output.text for output in outputs)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 30))] for _ in range(count)]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=["greedy", "seeded"])
def test_b58_batched_equals_alone(options: dict[str, Any]) -> None:
    """More requests than slots, greedy and seeded: everyone gets the text that they get alone."""
    wanted = prompts(11)
    seqs = [make_sequence(p, request_id=str(i), max_tokens=12, **options) for i, p in enumerate(wanted)]
    engine = make_engine(decoder := hash_decoder(slots=3), TOKENS)
    together = texts(run_all(engine, *seqs))
    assert together == {(str(i), 0): alone(p, max_tokens=12, **options) for i, p in enumerate(wanted)}
    assert max(len(call) for call in decoder.calls) == 3  # they did run side by side


def test_b58_cache_on_equals_cache_off() -> None:
    engine = make_engine(decoder := hash_decoder(slots=1), TOKENS)
    prompt = list(range(20))
    first = run_all(engine, make_sequence(prompt, request_id="a", max_tokens=8, temperature=0))
    again = run_all(engine, make_sequence(prompt, request_id="b", max_tokens=8, temperature=0))
    assert (
        "".join(o.text for o in first) == "".join(o.text for o in again) == alone(prompt, max_tokens=8, temperature=0)
    )
    assert first[-1].end is not None
    assert again[-1].end is not None
    assert (first[-1].end.usage.cached_tokens, again[-1].end.usage.cached_tokens) == (0, 18)
    assert decoder.calls[-8][0].start == 18  # it was not read again


def test_b21_the_prompt_is_counted_whole_when_it_came_from_cache() -> None:
    engine = make_engine(hash_decoder(slots=1), TOKENS)
    ends = [run_all(engine, make_sequence(range(20), request_id=r, max_tokens=1))[-1].end for r in "ab"]
    assert [end.usage.prompt_tokens for end in ends if end] == [20, 20]


def test_next_turn_reads_only_what_is_new() -> None:
    engine = make_engine(decoder := hash_decoder(slots=2), TOKENS)
    prompt = list(range(10))
    first = run_all(engine, make_sequence(prompt, max_tokens=6, temperature=0))
    answer = [token for output in first for token in output.token_ids]
    decoder.calls.clear()
    turn_two = [*prompt, *answer, 7, 8, 9]
    second = run_all(engine, make_sequence(turn_two, request_id="2", max_tokens=1, temperature=0))
    assert second[-1].end is not None
    # The answer's last token was drawn but never decoded, so it is new as well.
    assert second[-1].end.usage.cached_tokens == len(prompt) + len(answer) - 1
    assert [len(row.tokens) for call in decoder.calls for row in call] == [4]
    assert "".join(o.text for o in second) == alone(turn_two, max_tokens=1, temperature=0)


def test_an_edited_turn_keeps_what_is_before_the_edit() -> None:
    engine = make_engine(hash_decoder(slots=1), TOKENS)
    run_all(engine, make_sequence(range(30), request_id="a", max_tokens=3))
    edited = [*range(16), 5, *range(17, 30)]
    second = run_all(engine, make_sequence(edited, request_id="b", max_tokens=3, temperature=0))
    assert second[-1].end is not None
    assert second[-1].end.usage.cached_tokens == 16
    assert "".join(o.text for o in second) == alone(edited, max_tokens=3, temperature=0)


def test_a_model_that_cannot_rewind_reads_again_and_is_right() -> None:
    decoder = hash_decoder(slots=1)
    decoder.can_rewind = False
    engine = make_engine(decoder, TOKENS)
    run_all(engine, make_sequence(range(30), request_id="a", max_tokens=3))
    second = run_all(engine, make_sequence(range(25), request_id="b", max_tokens=3, temperature=0))
    assert second[-1].end is not None
    assert second[-1].end.usage.cached_tokens == 0
    assert "".join(o.text for o in second) == alone(list(range(25)), max_tokens=3, temperature=0)


def test_a_long_conversation_is_not_thrown_away_for_a_short_match() -> None:
    engine = make_engine(hash_decoder(slots=2), TOKENS)
    long = list(range(30))
    run_all(engine, make_sequence(long, request_id="a", max_tokens=1))
    run_all(engine, make_sequence([0, 1, 2, 20, 21], request_id="b", max_tokens=1))
    again = run_all(engine, make_sequence(long, request_id="c", max_tokens=1))
    assert again[-1].end is not None
    assert again[-1].end.usage.cached_tokens == 28


def test_no_chunk_of_one_token_and_none_left_over() -> None:
    """One row of a sequence is not bitwise what it is among several, so a prompt never has a one-row chunk."""
    for chunk in (4, 5, 6, 7):
        for size in range(2, 40):
            config = EngineConfig(prefill_chunk=chunk)
            decoder = hash_decoder()
            run_all(make_engine(decoder, TOKENS, config), make_sequence([1] * size, max_tokens=1, temperature=0))
            lengths = [len(row.tokens) for call in decoder.calls for row in call]
            assert sum(lengths) == size
            assert min(lengths) >= 2, (chunk, size, lengths)
            assert max(lengths) <= chunk


def test_chunks_of_one_call_have_equal_length() -> None:
    seqs = [make_sequence(p, request_id=str(i), max_tokens=2) for i, p in enumerate(prompts(12)) if len(p) > 1]
    run_all(make_engine(decoder := hash_decoder(), TOKENS), *seqs)
    assert any(len(call) > 1 and len(call[0].tokens) > 1 for call in decoder.calls)
    for call in decoder.calls:
        assert len({len(row.tokens) for row in call}) == 1


def test_b35_a_running_stream_is_in_every_step_while_a_prompt_is_read() -> None:
    decoder = hash_decoder(context=1000)
    engine = make_engine(decoder, TOKENS, EngineConfig(prefill_chunk=64))
    engine.submit(make_sequence([1, 2, 3], request_id="a", max_tokens=500, ignore_eos=True))
    engine.step(lambda _: None)
    engine.submit(make_sequence([4] * 800, request_id="b", max_tokens=1))
    decoder.calls.clear()
    seen: list[list[SequenceOutput]] = []
    while not any(output.request_id == "b" for batch in seen for output in batch):
        engine.step(seen.append)
    chunks = [call for call in decoder.calls if len(call[0].tokens) > 1]
    decodes = [call for call in decoder.calls if len(call[0].tokens) == 1]
    assert len(chunks) == len(decodes) == 13  # one decode call before each prefill call
    assert max(len(call[0].tokens) for call in chunks) == 64
    # A step's tokens go out before its prefill call starts.
    assert [batch[0].request_id for batch in seen[:13]] == ["a"] * 13


def test_shorter_prompts_overtake_and_long_ones_are_not_starved() -> None:
    engine = make_engine(hash_decoder(slots=3, context=2000), TOKENS, EngineConfig(prefill_chunk=16))
    order: list[str] = []

    def deliver(outputs: list[SequenceOutput]) -> None:
        order.extend(output.request_id for output in outputs if output.end)

    engine.submit(make_sequence([1] * 200, request_id="long", max_tokens=1))
    for i in range(40):
        engine.submit(make_sequence([2] * 30, request_id=f"s{i}", max_tokens=1))
    while not engine.idle:
        engine.step(deliver)
    assert order[0] == "s0"
    assert "long" in order[:30]


def test_cancel_in_every_state_frees_the_slot() -> None:
    for steps in range(0, 12, 3):
        engine = make_engine(hash_decoder(slots=1), TOKENS, EngineConfig(prefill_chunk=5))
        seq = make_sequence(range(30), request_id="a", max_tokens=30, ignore_eos=True)
        engine.submit(seq)
        engine.submit(make_sequence([3, 4], request_id="b", max_tokens=2, temperature=0))
        sent: list[SequenceOutput] = []
        for _ in range(steps):
            engine.step(sent.extend)
        sent += engine.cancel("a")
        assert seq.status is SequenceStatus.FINISHED
        assert engine.cancel("a") == []
        engine.check()
        assert [o.end.reason for o in sent if o.end and o.request_id == "a"] == [FinishReason.CANCELLED]
        assert texts(run_all(engine))[("b", 0)] == alone([3, 4], max_tokens=2, temperature=0)


def test_what_was_read_before_a_cancel_stays_as_cache() -> None:
    engine = make_engine(hash_decoder(slots=1), TOKENS, EngineConfig(prefill_chunk=10))
    engine.submit(make_sequence(range(30), request_id="a"))
    engine.step(lambda _: None)
    engine.step(lambda _: None)
    engine.cancel("a")
    end = run_all(engine, make_sequence(range(30), request_id="b", max_tokens=1))[-1].end
    assert end is not None
    assert end.usage.cached_tokens == 20


def test_a_cancelled_waiting_request_never_starts() -> None:
    decoder = hash_decoder(slots=1)
    engine = make_engine(decoder, TOKENS)
    engine.submit(make_sequence([1, 2], request_id="a", max_tokens=2))
    engine.submit(make_sequence([30, 31], request_id="gone", max_tokens=2))
    engine.cancel("gone")
    run_all(engine)
    assert not any(30 in row.tokens for call in decoder.calls for row in call)


def test_parked_and_resumed_equals_never_parked() -> None:
    decoder = hash_decoder(slots=2)
    engine = make_engine(decoder, TOKENS)
    sent: list[SequenceOutput] = []
    engine.submit(make_sequence([1, 2, 3], request_id="a", max_tokens=20, temperature=1, seed=3, ignore_eos=True))
    engine.submit(make_sequence([4, 5, 6], request_id="b", max_tokens=20, temperature=0, ignore_eos=True))
    for _ in range(5):
        engine.step(sent.extend)
    engine.park("a")
    before = len([o for o in sent if o.request_id == "a"])
    for _ in range(5):
        engine.step(sent.extend)
    assert len([o for o in sent if o.request_id == "a"]) == before  # it took no part
    engine.resume("a")
    sent += run_all(engine)
    assert texts(sent)[("a", 0)] == alone([1, 2, 3], max_tokens=20, temperature=1, seed=3, ignore_eos=True)
    assert texts(sent)[("b", 0)] == alone([4, 5, 6], max_tokens=20, temperature=0, ignore_eos=True)


def test_a_stream_that_stays_parked_is_cancelled_after_the_stall_timeout() -> None:
    clock = FakeClock()
    engine = make_engine(hash_decoder(), TOKENS, EngineConfig(stall_timeout_s=10), clock)
    engine.submit(make_sequence([1, 2], max_tokens=50, ignore_eos=True))
    engine.step(lambda _: None)
    engine.park("r")
    assert engine.idle
    assert engine.next_deadline == 10
    clock.now = 9.9
    engine.step(lambda _: pytest.fail("too early"))
    clock.now = 10
    sent: list[SequenceOutput] = []
    engine.step(sent.extend)
    assert [o.end.reason for o in sent if o.end] == [FinishReason.CANCELLED]
    engine.check()


def test_max_time_ends_running_and_waiting_requests() -> None:
    clock = FakeClock()
    engine = make_engine(hash_decoder(slots=1), TOKENS, clock=clock)
    engine.submit(make_sequence([1, 2], request_id="a", max_time_s=5, ignore_eos=True))
    engine.submit(make_sequence([1, 2], request_id="b", max_time_s=5))
    sent: list[SequenceOutput] = []
    engine.step(sent.extend)
    clock.now = 6
    engine.step(sent.extend)
    ends = {o.request_id: o.end for o in sent if o.end}
    assert {r: e.reason for r, e in ends.items()} == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    assert ends["b"].timing.queued_s == 6
    assert engine.idle


def test_b39_the_end_of_the_context_is_length() -> None:
    decoder = hash_decoder(context=64)
    seq = make_sequence(list(range(30)) * 2, max_tokens=50, temperature=0, ignore_eos=True)
    end = run_all(make_engine(decoder, TOKENS), seq)[-1].end
    assert end is not None
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 4)
    assert len(seq.token_ids) == 64


def test_max_tokens_ends_with_length_and_a_natural_end_with_stop() -> None:
    assert say([b"a", b"b", b"c"], max_tokens=2)[1].end.reason == "length"  # type: ignore[union-attr]
    assert say([b"a", b"b", b"c"])[1].end.reason == "stop"  # type: ignore[union-attr]
    assert say([b"a", b"b", b"c"])[1].end.usage.completion_tokens == 3  # type: ignore[union-attr]


def test_b14_every_end_token_ends_the_run_and_control_tokens_have_no_text() -> None:
    table = [b"", b"hi", b"<ctl>", b"!", b"<eot>", b"<eos>"]
    for end in (4, 5):
        tokens = FakeTokens(table, ends={4, 5}, control=frozenset({2}))
        decoder = ScriptedDecoder(len(table))
        engine = make_engine(decoder, tokens)
        bias = {} if end == 4 else {4: -100.0, 5: 100.0}
        outputs = run_all(engine, make_sequence([START], temperature=0, max_tokens=9, logit_bias=bias))
        text = "".join(output.text for output in outputs)
        assert outputs[-1].end is not None
        assert outputs[-1].end.reason == FinishReason.STOP
        assert "<" not in text
        assert text == ("hi!" if end == 4 else "")


def test_min_tokens_and_ignore_eos_keep_the_model_from_ending() -> None:
    decoder, tokens = scripted([b"a"])
    end = run_all(make_engine(decoder, tokens), make_sequence([START], temperature=0, min_tokens=5))[-1].end
    assert end is not None
    assert end.usage.completion_tokens >= 5
    decoder, tokens = scripted([b"a"])
    engine = make_engine(decoder, tokens)
    end = run_all(engine, make_sequence([START], temperature=0, ignore_eos=True, max_tokens=20))[-1].end
    assert end is not None
    assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 20)


def test_stop_token_ids_end_the_run_without_their_text() -> None:
    deltas, last = say([b"a", b"b", b"c"], stop_token_ids=[3])
    assert deltas == ["a", "b"]
    assert last.end is not None
    assert last.end.stop_sequence == 3


def test_n_answers_have_their_own_random_state() -> None:
    engine = make_engine(hash_decoder(), TOKENS)
    seqs = [
        make_sequence([1, 2, 3], index=i, seed=50 + i, temperature=1, max_tokens=8, ignore_eos=True) for i in range(3)
    ]
    together = texts(run_all(engine, *seqs))
    assert len(set(together.values())) == 3
    for i in range(3):
        assert together[("r", i)] == alone([1, 2, 3], seed=50 + i, temperature=1, max_tokens=8, ignore_eos=True)


def test_b59_temperature_zero_is_argmax_whatever_the_seed_and_top_k() -> None:
    row = [0.0, 3.0, 3.9, 4.0, 1.0, -9.0]
    tokens = FakeTokens([b"abcdef"[i : i + 1] for i in range(6)], ends=set())
    for seed in range(1, 6):
        seq = make_sequence([START], temperature=0, top_k=40, seed=seed, max_tokens=5)
        outputs = run_all(make_engine(FixedDecoder(row), tokens), seq)
        assert "".join(o.text for o in outputs) == "ddddd"
    biased = make_sequence([START], temperature=0, max_tokens=2, logit_bias={4: 10})
    assert "".join(o.text for o in run_all(make_engine(FixedDecoder(row), tokens), biased)) == "ee"
    penalised = make_sequence([START], temperature=0, max_tokens=3, presence_penalty=0.5)
    assert "".join(o.text for o in run_all(make_engine(FixedDecoder(row), tokens), penalised)) == "dcd"


@pytest.mark.parametrize(
    ("order", "expected"),
    [(["min_p", "temperature"], {"a", "b"}), (["temperature", "min_p"], {"a", "b", "c"})],
)
def test_b59_the_order_of_min_p_and_temperature_is_what_is_asked(order: list[str], expected: set[str]) -> None:
    tokens = FakeTokens([b"a", b"b", b"c"], ends=set())
    seen: set[str] = set()
    for seed in range(20):
        seq = make_sequence([START], temperature=5, min_p=0.4, samplers=order, seed=seed, max_tokens=40)
        seen |= set("".join(o.text for o in run_all(make_engine(FixedDecoder([4, 3.9, 0]), tokens), seq)))
    assert seen == expected


def test_b59_by_default_min_p_comes_before_temperature() -> None:
    order = make_options({}).sampling.samplers
    assert order.index("min_p") < order.index("temperature")
    assert order[0] == "penalties"


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": float("nan")},
        {"temperature": 1e9},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": -1},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 1.5},
        {"repeat_penalty": 0},
        {"repeat_penalty": float("inf")},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"min_tokens": 3, "max_tokens": 2},
        {"max_time_s": 0},
        {"stop": [""]},
        {"stop": 3},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1: float("nan")}},
        {"seed": -1},
        {"seed": 2**32},
        {"samplers": ["top_q"]},
        {"samplers": ["top_k", "top_k"]},
        {"mirostat": 3},
        {"n": 0},
        {"logprobs": -1},
        {"ignore_eos": "yes"},
        {"tempreature": 1},
    ],
    ids=str,
)
def test_b62_odd_values_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        make_options(bad)
    assert caught.value.field in bad
    assert str(caught.value.field) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"dynatemp_range": 0.5},
        {"top_n_sigma": 1.0},
        {"typical_p": 0.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"mirostat": 1},
        {"mirostat": 2},
        {"repeat_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repeat_last_n": 2**31 - 1},
        {"top_k": 0, "top_p": 1, "min_p": 0},
        {"samplers": []},
        {"logit_bias": {3: float("-inf")}},
    ],
    ids=str,
)
def test_every_sampler_is_deterministic_and_changes_something(options: dict[str, Any]) -> None:
    def run(**more: Any) -> str:
        outputs = run_all(
            make_engine(hash_decoder(), TOKENS),
            *(
                make_sequence([1, 2, 3], request_id=str(s), seed=s, max_tokens=15, ignore_eos=True, **more)
                for s in range(4)
            ),
        )
        return str(sorted(texts(outputs).items()))

    base: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0}
    assert run(**base | options) == run(**base | options)
    if options not in ({"top_k": 0, "top_p": 1, "min_p": 0}, {"logit_bias": {3: float("-inf")}}):
        assert run(**base | options) != run(**base)


def test_logprobs_are_of_the_model_and_come_for_every_token() -> None:
    row = [4.0, 3.0, 2.0, 1.0]
    tokens = FakeTokens([b"\xe7", b"b", b"c", b"d"], ends=set())
    seq = make_sequence([START], temperature=0, max_tokens=3, logprobs=2, logit_bias={2: 50})
    outputs = run_all(make_engine(FixedDecoder(row), tokens), seq)
    entries = [entry for output in outputs for entry in output.logprobs]
    assert [entry.chosen.token_id for entry in entries] == [2, 2, 2]
    assert entries[0].chosen.logprob == pytest.approx(-2.4401897, abs=1e-5)  # without the bias
    assert [top.token_id for top in entries[0].top] == [0, 1]
    assert entries[0].top[0].raw == b"\xe7"


def test_an_illegal_transition_is_an_error() -> None:
    seq = make_sequence([1])
    with pytest.raises(EngineError, match="WAITING → DECODE"):
        seq.advance(SequenceStatus.DECODE)


def test_timing_counts_what_happened() -> None:
    clock = FakeClock()
    decoder, tokens = scripted([b"a", b"\xe7", b"\x95\x8c", b"d"])
    engine = make_engine(decoder, tokens, clock=clock)
    engine.submit(make_sequence([START], temperature=0))
    sent: list[SequenceOutput] = []
    while not engine.idle:
        clock.now += 1
        engine.step(sent.extend)
    end = sent[-1].end
    assert end is not None
    timing = end.timing
    assert (timing.queued_s, timing.ttft_s, timing.total_s, timing.decode_s) == (1, 1, 5, 3)
    assert (timing.stall_s, timing.itl_s) == (2, 1.5)  # the half character made one gap of two steps
    assert timing.tokens_per_s == 1


def test_random_operations_keep_the_accounts() -> None:
    """Two thousand submits, cancels, parks, resumes and steps: every account agrees, every text is right."""
    rng = random.Random(11)
    clock = FakeClock()
    engine = make_engine(hash_decoder(slots=3), TOKENS, EngineConfig(prefill_chunk=7), clock)
    asked: dict[str, Sequence] = {}
    sent: list[SequenceOutput] = []
    for i in range(2000):
        match rng.randrange(8):
            case 0 if len(asked) < 400:
                size = rng.randint(1, 40)
                prompt = [rng.randrange(3) for _ in range(size)]
                seq = make_sequence(prompt, request_id=str(i), seed=i, temperature=1, max_tokens=rng.randint(1, 20))
                asked[str(i)] = seq
                engine.submit(seq)
            case 1 if rng.random() < 0.2 and asked:
                sent += engine.cancel(rng.choice(list(asked)))
            case 2 if asked:
                engine.park(rng.choice(list(asked)))
            case 3 if asked:
                engine.resume(rng.choice(list(asked)))
            case _:
                engine.step(sent.extend)
        clock.now += 0.01
        engine.check()
    for request_id in asked:
        engine.resume(request_id)
    while not engine.idle:
        engine.step(sent.extend)
        engine.check()
    ends = {o.request_id: o.end for o in sent if o.end}
    assert ends.keys() == asked.keys()
    assert sum(end.usage.cached_tokens > 0 for end in ends.values()) > 20
    joined = texts(sent)
    for request_id, end in ends.items():
        seq = asked[request_id]
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        limit = seq.options.limits.max_tokens
        expected = alone(prompt, seed=int(request_id), temperature=1, max_tokens=limit)
        if end.reason is FinishReason.CANCELLED:
            assert expected.startswith(joined.get((request_id, 0), ""))
        else:
            assert joined.get((request_id, 0), "") == expected
