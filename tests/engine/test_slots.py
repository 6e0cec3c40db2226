"""Which prompts keep their KV, and how prompts read together are cut; seen from outside, through the engine."""

import itertools

import pytest

from legato.engine.config import EngineConfig
from legato.engine.engine import Engine
from legato.engine.sequence import Sequence, SequenceOutput
from tests.fakes import FakeTokens, HashDecoder, make_engine, make_sequence

VOCAB = 40
TOKENS = FakeTokens([bytes([65 + i % 26]) for i in range(VOCAB)], ends={VOCAB - 1})
# Prompts of 20 tokens that have no prefix in common.
A, B, C, UNRELATED = ([first, *range(1, 20)] for first in (30, 31, 32, 33))


def three_slots() -> Engine:
    """Without RAM to fall back to, so that what a slot loses is seen."""
    return make_engine(HashDecoder(VOCAB, num_slots=3), TOKENS, EngineConfig(prefill_chunk=4, cache_ram_mb=0))


def finish(engine: Engine, *seqs: Sequence) -> list[SequenceOutput]:
    """`run_all`, but steps that read nothing fail instead of hanging."""
    outputs: list[SequenceOutput] = []
    for seq in seqs:
        engine.submit(seq)
    for _ in range(500):
        if engine.idle:
            return outputs
        engine.step(outputs.extend)
        engine.check()
    pytest.fail("still not done after 500 steps")


def cached(engine: Engine, prompt: list[int]) -> int:
    """Run the prompt; → tokens of it that were not read again."""
    end = finish(engine, make_sequence(prompt, request_id="once", max_tokens=2, temperature=0))[-1].end
    assert end is not None
    return end.usage.cached_tokens


def test_the_slot_unused_for_longest_is_given_away() -> None:
    engine = three_slots()
    assert [cached(engine, prompt) for prompt in (A, B, C, UNRELATED)] == [0, 0, 0, 0]
    assert cached(engine, C) >= 15
    assert cached(engine, B) >= 15
    assert cached(engine, A) == 0


def test_asking_again_makes_a_slot_the_newest() -> None:
    engine = three_slots()
    for prompt in (A, B, C):
        cached(engine, prompt)
    assert cached(engine, A) >= 15
    assert cached(engine, UNRELATED) == 0
    assert cached(engine, A) >= 15
    assert cached(engine, C) >= 15
    assert cached(engine, B) == 0


def test_an_empty_slot_is_taken_before_one_that_remembers() -> None:
    engine = three_slots()
    for prompt in (A, B, UNRELATED):
        assert cached(engine, prompt) == 0
    for prompt in (A, B, UNRELATED):
        assert cached(engine, prompt) >= 15


def test_an_empty_slot_is_taken_before_one_that_remembers_a_little_of_the_prompt() -> None:
    engine = three_slots()
    cached(engine, A)
    cached(engine, [*A[:3], 25, 26, 27])
    assert cached(engine, A) >= 15


def test_a_slot_that_was_given_back_before_it_read_anything_counts_as_empty() -> None:
    engine = three_slots()
    cached(engine, A)
    for prompt, request_id in ((B, "reads"), (C, "only has its slot")):
        engine.submit(make_sequence(prompt, request_id=request_id))
    engine.step(lambda _: None)
    for request_id in ("reads", "only has its slot"):
        (last,) = engine.cancel(request_id)
        assert last.end is not None
    assert cached(engine, UNRELATED) == 0
    assert cached(engine, A) >= 15


def prefill_rows(prompts: list[list[int]], prefill_chunk: int) -> list[list[tuple[int, int]]]:
    """(first token, length) of the rows of every call. One answer token each, so every call reads prompts."""
    decoder = HashDecoder(VOCAB, num_slots=max(2, len(prompts)), context_length=128)
    engine = make_engine(decoder, TOKENS, EngineConfig(prefill_chunk=prefill_chunk))
    seqs = [make_sequence(p, request_id=str(i), max_tokens=1, temperature=0) for i, p in enumerate(prompts)]
    ended = [output.request_id for output in finish(engine, *seqs) if output.end]
    assert sorted(ended) == sorted(seq.request_id for seq in seqs)
    return [[(row.tokens[0], len(row.tokens)) for row in call] for call in decoder.calls]


@pytest.mark.parametrize("chunk", [4, 5, 6, 7, 64])
def test_a_one_token_prompt_beside_a_long_one_makes_no_row_of_one_token_of_the_long_one(chunk: int) -> None:
    for size in range(2, 40):
        rows = [row for call in prefill_rows([[1] * size, [2]], chunk) for row in call]
        lengths = [length for token, length in rows if token == 1]
        assert sum(lengths) == size
        assert min(lengths) > 1, (size, lengths)
        assert [length for token, length in rows if token == 2] == [1]


@pytest.mark.parametrize("chunk", [8, 13, 30, 32, 64])
def test_no_pair_of_prompts_leaves_a_chunk_of_one_token(chunk: int) -> None:
    near = [(size, size + more) for size in range(2, 40) for more in (1, 2, 3)]
    for sizes in [*near, (31, 30), (32, 30), (9, 40), (16, 17), (33, 64)]:
        for one, other in (sizes, sizes[::-1]):
            calls = prefill_rows([[1] * one, [2] * other], chunk)
            lengths = [length for call in calls for _, length in call]
            assert sum(lengths) == one + other
            assert min(lengths) > 1, (one, other, lengths)
            assert max(lengths) <= chunk


@pytest.mark.parametrize(("size", "chunk"), [*itertools.product((8, 20, 33, 100), (16, 40, 64))])
def test_prompts_read_together_share_one_budget(size: int, chunk: int) -> None:
    calls = prefill_rows([[i] * size for i in range(8)], chunk)
    assert sum(length for call in calls for _, length in call) == 8 * size
    for call in calls:
        assert sum(length for _, length in call) <= chunk
        assert len({length for _, length in call}) == 1
    if size * 2 <= chunk:
        assert max(len(call) for call in calls) == min(8, chunk // size)
