"""Nothing is read twice, and what was moved is as good as what was read."""

import random
from typing import Any

import pytest

from legato.engine.config import EngineConfig
from legato.engine.prefix_cache import WORTH_WAITING
from legato.engine.sequence import SequenceOutput
from tests.fakes import FakeTokens, HashDecoder, RecordingDecoder, make_engine, make_sequence, run_all

VOCAB = 40
TOKENS = FakeTokens([bytes([65 + i % 26]) for i in range(VOCAB)], ends={VOCAB - 1})
SYSTEM = [int(t) for t in random.Random(1).choices(range(VOCAB - 1), k=100)]


class WatchedDecoder(HashDecoder):
    """Counts what was moved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.moves: list[str] = []

    def fork(self, source: int, target: int) -> bool:
        assert source != target
        self.moves.append("fork")
        return super().fork(source, target)

    def save(self, slot: int) -> bytes:
        self.moves.append("save")
        return super().save(slot)

    def restore(self, slot: int, data: bytes) -> bool:
        self.moves.append("restore")
        return super().restore(slot, data)


def decoder(slots: int = 4) -> WatchedDecoder:
    return WatchedDecoder(VOCAB, num_slots=slots, context_length=1000)


def num_read(used: RecordingDecoder) -> int:
    """Prompt tokens that went through the model."""
    return sum(len(row.tokens) for call in used.calls for row in call if len(row.tokens) > 1)


def joined(outputs: list[SequenceOutput]) -> dict[tuple[str, int], str]:
    texts: dict[tuple[str, int], str] = {}
    for output in outputs:
        key = output.request_id, output.index
        texts[key] = texts.get(key, "") + output.text
    return texts


def cached(outputs: list[SequenceOutput]) -> dict[str, int]:
    return {output.request_id: output.end.usage.cached_tokens for output in outputs if output.end}


def ask(prompt: list[int], request_id: str = "r", **options: Any) -> Any:
    return make_sequence(prompt, request_id=request_id, **{"temperature": 0, "max_tokens": 4, **options})


def alone(prompt: list[int], **options: Any) -> str:
    return joined(run_all(make_engine(decoder(), TOKENS), ask(prompt, **options)))[("r", 0)]


def test_b58_requests_that_share_a_cold_prefix_read_it_once() -> None:
    prompts = [[*SYSTEM, *[i] * 10] for i in range(4)]
    used = decoder()
    outputs = run_all(
        make_engine(used, TOKENS, EngineConfig(prefill_chunk=16)), *(ask(p, str(i)) for i, p in enumerate(prompts))
    )
    assert num_read(used) <= len(SYSTEM) + 4 * 10 + 16  # the first read whole chunks past the shared part
    assert used.moves == ["fork"] * 3
    assert joined(outputs) == {(str(i), 0): alone(p) for i, p in enumerate(prompts)}
    known = sorted(cached(outputs).values())
    assert known[0] == 0
    assert known[1] > len(SYSTEM) - WORTH_WAITING


def test_several_answers_read_their_prompt_once() -> None:
    used = decoder()
    sequences = [make_sequence(SYSTEM, index=i, seed=i, temperature=1, max_tokens=5) for i in range(3)]
    outputs = run_all(make_engine(used, TOKENS), *sequences)
    assert num_read(used) == len(SYSTEM) + 2 * 2
    for i in range(3):
        assert joined(outputs)[("r", i)] == alone(SYSTEM, seed=i, temperature=1, max_tokens=5)


def test_when_the_reader_of_a_shared_prefix_is_cancelled_the_next_goes_on_from_there() -> None:
    used = decoder()
    engine = make_engine(used, TOKENS, EngineConfig(prefill_chunk=16))
    engine.submit(ask([*SYSTEM, 1, 2], "a"))
    engine.submit(ask([*SYSTEM, 3, 4], "b"))
    engine.step(lambda _: None)
    engine.step(lambda _: None)
    engine.cancel("a")
    outputs = run_all(engine)
    assert cached(outputs)["b"] == 32
    assert joined(outputs)[("b", 0)] == alone([*SYSTEM, 3, 4])


def test_a_running_stream_gives_its_prefix_away_and_is_not_disturbed() -> None:
    used = decoder()
    engine = make_engine(used, TOKENS)
    sent: list[SequenceOutput] = []
    engine.submit(ask([*SYSTEM, 1, 2], "a", max_tokens=20, ignore_eos=True))
    for _ in range(5):
        engine.step(sent.extend)
    sent += run_all(engine, ask([*SYSTEM, 3, 4], "b"))
    assert cached(sent)["b"] == 100
    assert joined(sent)[("a", 0)] == alone([*SYSTEM, 1, 2], max_tokens=20, ignore_eos=True)
    assert joined(sent)[("b", 0)] == alone([*SYSTEM, 3, 4])


def test_a_fork_leaves_the_conversation_that_it_came_from() -> None:
    used = decoder(slots=2)
    engine = make_engine(used, TOKENS)
    talk = [*SYSTEM, *range(30)]
    run_all(engine, ask(talk, "a"))
    run_all(engine, ask([*SYSTEM, 30, 31, 32], "b"))
    assert cached(run_all(engine, ask(talk, "c")))["c"] == len(talk) - 2


def test_what_is_pushed_out_of_a_slot_comes_back_from_ram() -> None:
    used = decoder(slots=1)
    engine = make_engine(used, TOKENS)
    other = [int(t) for t in random.Random(2).choices(range(VOCAB - 1), k=100)]
    run_all(engine, ask(SYSTEM, "a"))
    run_all(engine, ask(other, "b"))
    outputs = run_all(engine, ask([*SYSTEM[:90], 5, 6, 7], "c"))
    assert used.moves[-1] == "restore"
    assert cached(outputs)["c"] == 90
    assert joined(outputs)[("c", 0)] == alone([*SYSTEM[:90], 5, 6, 7])


def test_without_a_ram_budget_nothing_is_saved() -> None:
    used = decoder(slots=1)
    engine = make_engine(used, TOKENS, EngineConfig(cache_ram_mb=0))
    for i in range(3):
        run_all(engine, ask([i] * 100, str(i)))
    assert used.moves == []


def test_salts_keep_tenants_apart_in_slots_in_flight_and_in_ram() -> None:
    for slots in (1, 4):
        used = decoder(slots)
        engine = make_engine(used, TOKENS)
        together = run_all(engine, ask(SYSTEM, "a", cache_salt="x"), ask(SYSTEM, "b", cache_salt="y"))
        later = run_all(engine, ask(SYSTEM, "c", cache_salt="z"))
        assert set(cached(together + later).values()) == {0}
        assert cached(run_all(engine, ask(SYSTEM, "d", cache_salt="y")))["d"] == 98


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_model_that_cannot_rewind_is_right_and_reuses_only_what_is_whole(slots: int) -> None:
    used = decoder(slots)
    used.can_rewind = False
    engine = make_engine(used, TOKENS, EngineConfig(prefill_chunk=16))
    first = run_all(engine, ask(SYSTEM, "a", ignore_eos=True))
    answer = [token for output in first for token in output.token_ids]
    second = run_all(engine, ask([*SYSTEM, *answer, 1, 2, 3], "b"))
    assert cached(second)["b"] == len(SYSTEM) + len(answer) - 1
    edited = [*SYSTEM[:50], 9, *SYSTEM[51:]]
    outputs = run_all(engine, ask(edited, "c"), ask([*SYSTEM, 4, 4], "d"))
    assert cached(outputs)["c"] == 0
    assert joined(outputs) == {("c", 0): alone(edited), ("d", 0): alone([*SYSTEM, 4, 4])}


def test_priority_goes_first_into_a_slot() -> None:
    order: list[str] = []
    engine = make_engine(decoder(slots=1), TOKENS)
    for name, priority in (("low", 5), ("late", 0), ("urgent", -1), ("last", 5)):
        engine.submit(ask([1, 2, 3], name, priority=priority))
    while not engine.idle:
        engine.step(lambda outputs: order.extend(o.request_id for o in outputs if o.end))
    assert order == ["urgent", "late", "low", "last"]


def test_the_ram_budget_holds() -> None:
    used = decoder(slots=2)
    engine = make_engine(used, TOKENS, EngineConfig(cache_ram_mb=1))
    big = 2**20 // 4 // 3  # tokens whose state fills a third of it, in this decoder's format
    used.context_length = big + 10
    for i in range(8):
        engine.submit(ask([i] * big, str(i), max_tokens=1))
        while not engine.idle:
            engine.step(lambda _: None)
            engine.check()
    assert used.moves.count("save") >= 5


def test_what_ram_was_asked_for_lately_stays_longest() -> None:
    used = decoder(slots=1)
    big = 2**20 // 4 // 3 - 50  # tokens: three such states fit the budget
    used.context_length = big + 200
    engine = make_engine(used, TOKENS, EngineConfig(cache_ram_mb=1))
    for name in range(4):  # 0, 1 and 2 are in RAM then, 3 in the slot
        run_all(engine, ask([name] * big, str(name), max_tokens=1))
    assert cached(run_all(engine, ask([0] * big, "again", max_tokens=1)))["again"] == big - 2
    # 3 went into RAM for it, and pushed out the one that nobody had asked for longest: not 0, that was just used.
    assert cached(run_all(engine, ask([1] * big, "1 is gone", max_tokens=1)))["1 is gone"] == 0
    assert cached(run_all(engine, ask([0] * big, "once more", max_tokens=1)))["once more"] == big - 2


def test_random_conversations_with_shared_beginnings_are_right() -> None:
    """Two thousand operations on few slots: accounts agree, texts are right, and little is read."""
    rng = random.Random(9)
    used = decoder(slots=3)
    engine = make_engine(used, TOKENS, EngineConfig(prefill_chunk=24))
    systems = [[int(t) for t in rng.choices(range(VOCAB - 1), k=rng.randint(40, 120))] for _ in range(5)]
    asked: dict[str, list[int]] = {}
    sent: list[SequenceOutput] = []
    total = 0
    for i in range(2000):
        match rng.randrange(6):
            case 0 if len(asked) < 250:
                prompt = [*rng.choice(systems), *rng.choices(range(VOCAB - 1), k=rng.randint(1, 20))]
                asked[str(i)] = prompt
                total += len(prompt)
                engine.submit(ask(prompt, str(i), cache_salt=rng.choice(["", "", "s"])))
            case 1 if asked and rng.random() < 0.1:
                sent += engine.cancel(rng.choice(list(asked)))
            case _:
                engine.step(sent.extend)
        engine.check()
    while not engine.idle:
        engine.step(sent.extend)
        engine.check()
    ends = {output.request_id: output.end for output in sent if output.end}
    assert ends.keys() == asked.keys()
    for request_id, prompt in asked.items():
        text = joined(sent).get((request_id, 0), "")
        end = ends[request_id]
        assert end is not None
        assert alone(prompt).startswith(text) if end.reason == "cancelled" else text == alone(prompt)
    assert {"fork", "save", "restore"} <= set(used.moves)
    assert num_read(used) < total / 2
