"""The mailbox and the thread behind it, at the moments where something could be lost, kept or called twice."""

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from legato.core.errors import EngineError, OverloadedError
from legato.core.events import FinishReason
from legato.core.usage import Timing, Usage
from legato.engine.config import EngineConfig
from legato.engine.mailbox import Mailbox
from legato.engine.sequence import Sequence, SequenceEnd, SequenceOutput
from legato.engine.worker import EngineWorker
from legato.llama.batch import BatchRow
from tests.fakes import EngineUnderTest, FakeTokens, HashDecoder, make_sequence

VOCAB = 40
TOKENS = FakeTokens([bytes([65 + i % 26]) for i in range(VOCAB)], ends={VOCAB - 1})


class SteppedDecoder(HashDecoder):
    """Makes a call only when the test lets it, and fails at the call whose number is given."""

    fails_at: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._arrived = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def await_call(self) -> None:
        """Until the engine thread stands before its next call; all that came before is delivered then."""
        assert self._arrived.acquire(timeout=30), "the engine made no call"

    def let_go(self, calls: int = 1) -> None:
        self._go.release(calls)

    def decode(self, rows: Rows[BatchRow]) -> NDArray[np.float32]:
        self._arrived.release()
        assert self._go.acquire(timeout=30), "the test let no call go"
        if len(self.calls) + 1 == self.fails_at:
            raise EngineError("llama_decode returned -3")
        return super().decode(rows)


def start(decoder: HashDecoder, on_exit: Callable[[], None] = lambda: None, **config: Any) -> EngineWorker:
    settings = EngineConfig(**config)
    return EngineWorker(EngineUnderTest(decoder, TOKENS, settings), settings, decoder.num_slots, on_exit)


def seq(request_id: str, **options: Any) -> Sequence:
    given = {"temperature": 0, "ignore_eos": True, "max_tokens": 5, **options}
    return make_sequence([1, 2, 3], request_id=request_id, **given)


def read(mailbox: Mailbox) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while more := mailbox.get():
        outputs += more
    return outputs


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass within 30 s"
        time.sleep(0.002)


def output(num_tokens: int = 1, *, ends: bool = False) -> SequenceOutput:
    timing = Timing(0, None, None, None, 0, 0, num_tokens)
    end = SequenceEnd(FinishReason.STOP, Usage(1, 0, num_tokens), timing, None) if ends else None
    return SequenceOutput("r", 0, "x" * num_tokens, (1,) * num_tokens, (), end)


def test_what_came_before_an_error_is_read_first() -> None:
    box = Mailbox("r", 1, 10, lambda: None)
    box.put(first := output())
    box.fail(EngineError("dead"))
    assert box.get() == [first]
    for _ in range(2):
        with pytest.raises(EngineError, match="dead"):
            box.get()


def test_an_error_after_the_last_end_is_nobodys() -> None:
    box = Mailbox("r", 1, 10, lambda: None)
    box.put(last := output(ends=True))
    box.fail(EngineError("dead"))
    assert box.get() == [last]
    assert box.get() == []


def test_reading_empties_the_account_of_unread_tokens() -> None:
    emptied: list[bool] = []
    box = Mailbox("r", 1, 3, lambda: emptied.append(True))
    assert [box.put(output()) for _ in range(4)] == [False, False, False, True]
    assert len(box.get()) == 4
    assert emptied == [True]
    assert [box.put(output()) for _ in range(3)] == [False, False, False]
    assert len(box.get()) == 3
    assert emptied == [True]  # it was not parked again


def test_the_last_end_parks_nobody() -> None:
    box = Mailbox("r", 1, 3, lambda: None)
    assert box.put(output(9, ends=True)) is False


def test_an_unread_stream_ends_by_itself_and_the_thread_sleeps_until_then() -> None:
    worker = start(HashDecoder(VOCAB, context_length=400), unread_limit=3, stall_timeout_s=0.2)
    box = worker.submit([seq("a", max_tokens=300)])
    eventually(lambda: box.is_done)
    outputs = read(box)
    assert outputs[-1].end is not None
    assert outputs[-1].end.reason is FinishReason.CANCELLED
    assert outputs[-1].end.usage.completion_tokens == 4
    assert worker.num_steps < 50  # a thread that looks all the time makes thousands
    worker.close()


def test_a_request_that_comes_during_the_failing_step_gets_the_error() -> None:
    decoder = SteppedDecoder(VOCAB)
    decoder.fails_at = 1
    worker = start(decoder)
    boxes = [worker.submit([seq("a")])]
    decoder.await_call()
    boxes += [worker.submit([seq("b")]), worker.submit([seq("c")])]
    decoder.let_go()
    for box in boxes:
        eventually(lambda box=box: box.is_done)  # type: ignore[misc]
        with pytest.raises(EngineError, match="returned -3"):
            box.get()
    worker.close()


def test_tokens_before_a_death_are_read_before_the_error() -> None:
    decoder = SteppedDecoder(VOCAB)
    decoder.fails_at = 3
    worker = start(decoder)
    box = worker.submit([seq("a", max_tokens=9)])
    decoder.let_go(3)
    eventually(lambda: box.is_done)
    assert sum(len(out.token_ids) for out in box.get()) == 2
    with pytest.raises(EngineError, match="returned -3"):
        box.get()
    worker.close()


def test_the_worker_forgets_what_has_ended() -> None:
    worker = start(HashDecoder(VOCAB, num_slots=2, context_length=400))
    boxes = [worker.submit([seq(str(i), max_tokens=300)]) for i in range(3)]
    boxes.append(worker.submit([make_sequence([1, 2], request_id="n", index=i, max_tokens=3) for i in range(3)]))
    worker.cancel("0")
    for box in boxes:
        read(box)
    eventually(lambda: worker.is_idle and not worker._mailboxes)
    assert worker._num_open == 0
    worker.close()


@pytest.mark.parametrize("ends_by", ["limit", "cancel"])
def test_a_full_queue_refuses_and_takes_again_after_an_end(ends_by: str) -> None:
    decoder = SteppedDecoder(VOCAB, num_slots=1)
    worker = start(decoder, max_queue=1)
    boxes = [worker.submit([seq("a", max_tokens=1)]), worker.submit([seq("b", max_tokens=1)])]
    decoder.await_call()
    for count in (1, 3):
        with pytest.raises(OverloadedError, match=r"2 generations.* 2 is the most"):
            worker.submit([seq("c") for _ in range(count)])
    if ends_by == "cancel":
        worker.cancel("b")
        read_first = boxes[1]
    else:
        read_first = boxes[0]
    decoder.let_go(100)
    read(read_first)
    boxes.append(worker.submit([seq("c", max_tokens=1)]))
    for box in boxes:
        assert read(box) or box is read_first
    worker.close()
    assert worker._num_open == 0


def test_a_request_of_more_answers_than_fit_is_refused_whole() -> None:
    worker = start(HashDecoder(VOCAB, num_slots=1), max_queue=1)
    with pytest.raises(OverloadedError):
        worker.submit([make_sequence([1], index=i, max_tokens=1) for i in range(3)])
    assert len(read(worker.submit([make_sequence([1], index=i, max_tokens=1) for i in range(2)]))) == 2
    worker.close()


@pytest.mark.parametrize("dies", [False, True], ids=["closed", "died"])
def test_on_exit_runs_once_on_the_engine_thread_and_close_waits_for_it(dies: bool) -> None:
    decoder = SteppedDecoder(VOCAB)
    decoder.fails_at = 1 if dies else 0
    threads: list[threading.Thread] = []
    worker = start(decoder, on_exit=lambda: threads.append(threading.current_thread()))
    box = worker.submit([seq("a")])
    decoder.await_call()
    decoder.let_go(100)
    if dies:
        with pytest.raises(EngineError):
            read(box)
    else:
        read(box)
    worker.close()
    assert len(threads) == 1
    assert threads[0].name == "legato-engine"
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    worker.close()
    assert len(threads) == 1


def test_close_waits_for_the_step_under_way() -> None:
    decoder = SteppedDecoder(VOCAB)
    order: list[str] = []
    worker = start(decoder, on_exit=lambda: order.append("exit"))
    worker.submit([seq("a")])
    decoder.await_call()

    def close() -> None:
        worker.close()
        order.append("closed")

    closer = threading.Thread(target=close)
    closer.start()
    eventually(lambda: not worker._commands.empty())
    assert order == []
    decoder.let_go(100)
    closer.join(30)
    assert order == ["exit", "closed"]


async def test_a_reader_cancelled_while_its_wake_up_is_under_way_makes_no_noise() -> None:
    loop = asyncio.get_running_loop()
    noise: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: noise.append(context))
    decoder = SteppedDecoder(VOCAB)
    worker = start(decoder)
    box = worker.submit([seq("a")])
    decoder.await_call()
    task = asyncio.create_task(box.get_async())
    await asyncio.sleep(0)  # the task waits now
    decoder.let_go()
    decoder.await_call()  # the first token is delivered: its wake-up waits for this loop
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert noise == []
    decoder.let_go(100)
    rest = await asyncio.to_thread(read, box)
    assert sum(len(out.token_ids) for out in rest) == 5  # the token that woke it is still there
    worker.close()
