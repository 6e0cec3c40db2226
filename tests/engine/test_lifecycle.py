"""Deadlines, parking, cancelling and ends: when each of a request's sequences ends, and as what."""

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from legato.core.events import FinishReason
from legato.engine.config import EngineConfig
from legato.engine.engine import Engine
from legato.engine.sequence import SequenceEnd, SequenceOutput, SequenceStatus
from legato.llama.batch import BatchRow
from tests.fakes import FakeClock, FakeTokens, HashDecoder, make_engine, make_sequence, run_all

VOCAB = 40
TOKENS = FakeTokens([bytes([65 + i % 26]) for i in range(VOCAB)], ends={VOCAB - 1})


class SlowDecoder(HashDecoder):
    """A decode call takes the seconds that the test says."""

    clock: FakeClock
    seconds: float = 0.0

    def decode(self, rows: Rows[BatchRow]) -> NDArray[np.float32]:
        self.clock.now += self.seconds
        return super().decode(rows)


class World:
    """An engine, its clock, and what it has sent so far."""

    def __init__(self, slots: int = 4, **config: Any) -> None:
        self.clock = FakeClock()
        self.decoder = SlowDecoder(VOCAB, num_slots=slots, context_length=400)
        self.decoder.clock = self.clock
        self.engine: Engine = make_engine(self.decoder, TOKENS, EngineConfig(**config), self.clock)
        self.sent: list[SequenceOutput] = []

    def submit(self, request_id: str, **options: Any) -> None:
        """A request that does not end by itself soon."""
        n = options.get("n", 1)
        for index in range(n):
            more = {"temperature": 0, "ignore_eos": True, **options}
            seq = make_sequence([1, 2, 3], request_id=request_id, index=index, received=self.clock.now, **more)
            self.engine.submit(seq)

    def step(self, at: float | None = None) -> None:
        if at is not None:
            self.clock.now = at
        self.engine.step(self.sent.extend)
        self.engine.check()

    @property
    def ends(self) -> dict[tuple[str, int], SequenceEnd]:
        found = [((output.request_id, output.index), output.end) for output in self.sent if output.end is not None]
        assert len(dict(found)) == len(found), "an end came twice"
        return dict(found)

    @property
    def reasons(self) -> dict[str, FinishReason]:
        return {request_id: end.reason for (request_id, _), end in self.ends.items()}


def test_max_time_is_looked_at_right_after_a_token() -> None:
    world = World()
    world.submit("a", max_time_s=5)
    world.step()
    world.decoder.seconds = 6
    world.step()
    assert world.reasons == {"a": FinishReason.LENGTH}
    assert world.sent[-1].token_ids
    assert world.ends["a", 0].usage.completion_tokens == sum(len(output.token_ids) for output in world.sent) == 2
    assert world.engine.idle


def test_a_waiting_request_runs_out_of_time_while_the_one_before_it_runs() -> None:
    world = World(slots=1)
    world.submit("a")
    world.step()
    world.submit("b", max_time_s=5)
    world.step(at=4.9)
    assert world.ends == {}
    world.step(at=5)
    assert world.reasons == {"b": FinishReason.LENGTH}
    assert world.ends["b", 0].timing.queued_s == 5
    assert world.ends["b", 0].usage.completion_tokens == 0
    assert not world.engine.idle


def admitted_late() -> World:
    """ "a" came at 0, was admitted at 4, and has until 5; it is 4.5 now."""
    world = World(slots=1)
    world.submit("first", max_tokens=1)
    world.submit("a", max_time_s=5)
    world.step()  # the first one has the slot
    world.step(at=4)  # a is admitted and reads its prompt
    assert world.reasons == {"first": FinishReason.LENGTH}
    world.step(at=4.5)
    assert "a" not in world.reasons
    return world


def test_time_counts_from_when_a_request_came_also_while_it_is_parked() -> None:
    world = admitted_late()
    world.engine.park("a")
    assert world.engine.next_deadline == 5
    world.step(at=5)
    assert world.reasons["a"] is FinishReason.LENGTH


def test_time_counts_from_when_a_request_came_also_after_a_token() -> None:
    world = admitted_late()
    world.decoder.seconds = 0.5
    world.step()
    assert world.sent[-1].token_ids
    assert world.reasons["a"] is FinishReason.LENGTH


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_next_deadline_is_the_nearest(order: str) -> None:
    world = World()
    limits = {"a": 5.0, "b": 9.0}
    for name in order:
        world.submit(name, max_time_s=limits[name])
    assert world.engine.next_deadline == 5
    world.step()
    for name in order:
        world.engine.park(name)
    assert world.engine.idle
    assert world.engine.next_deadline == 5
    world.step(at=5)
    assert world.reasons == {"a": FinishReason.LENGTH}
    assert world.engine.next_deadline == 9
    world.step(at=9)
    assert world.engine.next_deadline is None


def test_no_deadline_without_limits() -> None:
    world = World()
    world.submit("a")
    world.step()
    assert world.engine.next_deadline is None


@pytest.mark.parametrize(
    ("max_time_s", "at", "reason"),
    [(5.0, 5.0, FinishReason.LENGTH), (20.0, 10.0, FinishReason.CANCELLED)],
    ids=["its time first", "its reader first"],
)
def test_a_parked_stream_ends_by_whichever_limit_comes_first(max_time_s: float, at: float, reason: str) -> None:
    world = World(stall_timeout_s=10)
    world.submit("a", max_time_s=max_time_s)
    world.step()
    world.engine.park("a")
    assert world.engine.next_deadline == at
    world.step(at=at - 0.1)
    assert world.ends == {}
    world.step(at=at)
    assert world.reasons == {"a": reason}
    assert world.engine.idle


def test_one_stall_timeout_ends_all_sequences_of_its_request_the_waiting_too() -> None:
    world = World(slots=2, stall_timeout_s=10)
    world.submit("a", n=16)
    world.step()
    world.engine.park("a")
    assert world.engine.idle
    world.step(at=10)
    assert [end.reason for end in world.ends.values()] == [FinishReason.CANCELLED] * 16
    assert world.engine.next_deadline is None
    assert world.engine.idle
    assert world.decoder.calls[1:] == []  # no waiting one was started


def test_a_stall_timeout_leaves_other_requests_alone() -> None:
    world = World(slots=2, stall_timeout_s=10)
    world.submit("a")
    world.submit("b")
    world.step()
    world.engine.park("a")
    world.step(at=10)
    assert world.reasons == {"a": FinishReason.CANCELLED}
    assert not world.engine.idle


@pytest.mark.parametrize("limits", [{}, {"max_time_s": 1000}], ids=["untimed", "timed"])
def test_a_resumed_stream_is_not_held_to_its_old_parking(limits: dict[str, float]) -> None:
    world = World(stall_timeout_s=10)
    world.submit("a", **limits)
    world.step()
    world.engine.park("a")
    world.step(at=5)
    world.engine.resume("a")
    assert world.engine.next_deadline == limits.get("max_time_s")
    world.step(at=50)
    assert world.ends == {}
    world.engine.park("a")
    world.step(at=59)
    assert world.ends == {}
    world.step(at=60)
    assert world.reasons == {"a": FinishReason.CANCELLED}


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("slots", [2, 4])
def test_a_cancel_ends_every_sequence_of_the_request(slots: int, steps: int) -> None:
    world = World(slots=slots)
    world.submit("a", n=3)
    for _ in range(steps):
        world.step()
    world.sent += world.engine.cancel("a")
    world.engine.check()
    assert sorted(index for _, index in world.ends) == [0, 1, 2]
    assert {end.reason for end in world.ends.values()} == {FinishReason.CANCELLED}
    assert world.engine.idle
    assert world.engine.cancel("a") == []


@pytest.mark.parametrize("ending", ["limit", "end token", "stop id", "cancel", "time", "cancelled while waiting"])
def test_every_end_closes_the_sampler(ending: str) -> None:
    """Its native memory goes with the sequence, not whenever the collector comes."""
    clock = FakeClock()
    engine = make_engine(HashDecoder(VOCAB, num_slots=1), TOKENS, clock=clock)
    options: dict[str, dict[str, Any]] = {
        "limit": {"max_tokens": 2, "ignore_eos": True},
        "end token": {"logit_bias": {VOCAB - 1: 1000}},
        "stop id": {"logit_bias": {5: 1000}, "stop_token_ids": [5]},
        "time": {"max_time_s": 5, "ignore_eos": True},
    }
    seq = make_sequence([1, 2, 3], temperature=1, **options.get(ending, {"ignore_eos": True}))
    engine.submit(seq)
    chain = seq.sampler._chain
    assert chain is not None
    assert chain._chain
    if ending != "cancelled while waiting":
        engine.step(lambda _: None)
    if ending.startswith("cancel"):
        engine.cancel("r")
    clock.now = 5
    run_all(engine)
    assert seq.status is SequenceStatus.FINISHED
    assert chain._chain is None
