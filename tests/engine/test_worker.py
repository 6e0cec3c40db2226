"""The thread and its doors: nothing hangs, nothing is lost, readers of every kind are woken."""

import asyncio
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from legato.core.errors import EngineError
from legato.engine.config import EngineConfig
from legato.engine.mailbox import Mailbox
from legato.engine.sequence import Sequence
from legato.engine.worker import EngineWorker
from legato.llama.batch import BatchRow
from tests.fakes import EngineUnderTest, FakeTokens, HashDecoder, RecordingDecoder, make_sequence

VOCAB = 40
TOKENS = FakeTokens([bytes([65 + i % 26]) for i in range(VOCAB)], ends={VOCAB - 1})


class GatedDecoder(HashDecoder):
    """Waits at a gate before the call whose number is given, and fails there when told to."""

    gate_at: int = 10**9
    fails: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_gate = threading.Event()
        self.gate = threading.Event()

    def decode(self, rows: Rows[BatchRow]) -> NDArray[np.float32]:
        if len(self.calls) + 1 == self.gate_at:
            self.at_gate.set()
            assert self.gate.wait(30)
            if self.fails:
                raise EngineError("llama_decode returned -3 for 4 tokens")
        return super().decode(rows)


def start(decoder: RecordingDecoder, **config: Any) -> EngineWorker:
    settings = EngineConfig(**config)
    engine = EngineUnderTest(decoder, TOKENS, settings)
    return EngineWorker(engine, settings, decoder.num_slots, on_exit=lambda: None)


@pytest.fixture
def worker() -> Iterator[EngineWorker]:
    started = start(HashDecoder(VOCAB, num_slots=3, context_length=200))
    yield started
    started.close()


def read(mailbox: Mailbox) -> str:
    text = ""
    while outputs := mailbox.get():
        text += "".join(output.text for output in outputs)
    return text


async def read_async(mailbox: Mailbox) -> str:
    text = ""
    while outputs := await mailbox.get_async():
        text += "".join(output.text for output in outputs)
    return text


def seq(i: int) -> Sequence:
    return make_sequence([i, i + 1, i + 2], request_id=str(i), temperature=0, max_tokens=30, ignore_eos=True)


def test_readers_on_threads_and_event_loops_get_the_same(worker: EngineWorker) -> None:
    def on_thread(i: int) -> str:
        return read(worker.submit([seq(i)]))

    def on_loop(i: int) -> str:
        return asyncio.run(read_async(worker.submit([seq(i)])))

    alone = [on_thread(i) for i in range(8)]
    with ThreadPoolExecutor(16) as pool:
        threads = list(pool.map(on_thread, range(8)))
    with ThreadPoolExecutor(8) as pool:
        loops = list(pool.map(on_loop, range(8, 16)))
    assert threads == alone
    assert len(set(alone)) == 8
    assert loops == [on_thread(i) for i in range(8, 16)]


async def test_many_tasks_on_one_loop(worker: EngineWorker) -> None:
    texts = await asyncio.gather(*(read_async(worker.submit([seq(i)])) for i in range(12)))
    assert [len(text) for text in texts] == [30] * 12


def test_b28_after_a_cancel_the_step_counter_stops() -> None:
    decoder = GatedDecoder(VOCAB, num_slots=1, context_length=100_000)
    decoder.gate_at = 6
    worker = start(decoder)
    mailbox = worker.submit([make_sequence([1, 2], max_tokens=90_000, ignore_eos=True)])
    assert decoder.at_gate.wait(30)
    worker.cancel("r")
    decoder.gate.set()
    read(mailbox)
    # The reader saw the end, so the engine has applied the cancel: it came right after the step under way.
    assert worker.num_steps == 6
    follow_up = read(worker.submit([make_sequence([1, 2], request_id="2", max_tokens=3, ignore_eos=True)]))
    assert len(follow_up) == 3
    worker.close()


def test_b29_a_cancel_in_prefill_takes_effect_at_the_next_chunk() -> None:
    decoder = GatedDecoder(VOCAB, num_slots=1, context_length=10_000)
    decoder.gate_at = 3
    worker = start(decoder, prefill_chunk=64)
    mailbox = worker.submit([make_sequence([1] * 8000, max_tokens=5)])
    assert decoder.at_gate.wait(30)
    worker.cancel("r")
    decoder.gate.set()
    (output,) = mailbox.get()
    assert output.end is not None
    assert output.end.reason == "cancelled"
    assert [len(row.tokens) for call in decoder.calls for row in call] == [64, 64, 64]
    # What was read stays as cache.
    box = worker.submit([make_sequence([1] * 8000, request_id="2", max_tokens=1)])
    end = box.get()[-1].end
    assert end is not None
    assert end.usage.cached_tokens == 192
    worker.close()


def test_when_the_engine_dies_all_ten_waiting_streams_get_the_error_and_later_calls_too() -> None:
    decoder = GatedDecoder(VOCAB, num_slots=4, context_length=200)
    decoder.gate_at, decoder.fails = 5, True
    worker = start(decoder)
    errors: list[str] = []

    def wait_for_the_end(i: int) -> None:
        with pytest.raises(EngineError) as caught:
            read(boxes[i])
        errors.append(str(caught.value))

    async def wait_on_a_loop(i: int) -> None:
        with pytest.raises(EngineError) as caught:
            await read_async(boxes[i])
        errors.append(str(caught.value))

    boxes = [worker.submit([seq(i)]) for i in range(10)]
    readers = [threading.Thread(target=wait_for_the_end, args=(i,)) for i in range(5)]
    readers += [threading.Thread(target=lambda i=i: asyncio.run(wait_on_a_loop(i))) for i in range(5, 10)]
    for reader in readers:
        reader.start()
    assert decoder.at_gate.wait(30)
    decoder.gate.set()
    for reader in readers:
        reader.join(30)
    assert errors == ["llama_decode returned -3 for 4 tokens"] * 10
    with pytest.raises(EngineError, match="llama_decode returned -3"):
        worker.submit([seq(1)])
    worker.close()  # harmless


def test_a_bug_in_the_engine_thread_is_an_engine_error_with_its_cause() -> None:
    class Broken(HashDecoder):
        def logits(self, held: list[int]) -> NDArray[np.float32]:
            raise ZeroDivisionError("oh")

    worker = start(Broken(VOCAB))
    with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
        read(worker.submit([seq(1)]))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_closing_ends_running_streams_with_an_error() -> None:
    decoder = GatedDecoder(VOCAB, num_slots=1, context_length=100_000)
    decoder.gate_at = 3
    worker = start(decoder)
    mailbox = worker.submit([make_sequence([1, 2], max_tokens=90_000, ignore_eos=True)])
    assert decoder.at_gate.wait(30)
    closer = threading.Thread(target=worker.close)
    closer.start()
    decoder.gate.set()
    closer.join(30)
    with pytest.raises(EngineError, match="closed"):
        read(mailbox)
    with pytest.raises(EngineError, match="closed"):
        worker.submit([seq(1)])


def test_an_unread_stream_is_parked_and_goes_on_when_it_is_read() -> None:
    """Its text is bounded while nobody reads, the neighbour is served meanwhile, and nothing is lost."""
    decoder = HashDecoder(VOCAB, num_slots=2, context_length=400)
    worker = start(decoder, unread_limit=20)
    slow = worker.submit([make_sequence([1, 2], request_id="slow", seed=4, max_tokens=300, ignore_eos=True)])
    fast = worker.submit([make_sequence([3, 4], request_id="fast", seed=4, max_tokens=300, ignore_eos=True)])
    assert len(read(fast)) == 300
    first = slow.get()
    assert sum(len(output.token_ids) for output in first) == 21  # parked right after it went over the limit
    text = "".join(output.text for output in first) + read(slow)
    worker.close()
    other = start(HashDecoder(VOCAB, num_slots=1, context_length=400))
    assert text == read(other.submit([make_sequence([1, 2], seed=4, max_tokens=300, ignore_eos=True)]))
    other.close()


async def test_a_reader_task_that_is_cancelled_leaves_the_others_alone(worker: EngineWorker) -> None:
    box = worker.submit([make_sequence([1, 2], request_id="gone", max_tokens=190, ignore_eos=True)])
    task = asyncio.create_task(read_async(box))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    worker.cancel("gone")
    assert len(await read_async(worker.submit([seq(3)]))) == 30


def test_a_closed_event_loop_does_not_hurt_the_engine(worker: EngineWorker) -> None:
    async def start_and_leave() -> None:
        box = worker.submit([make_sequence([5, 6], request_id="left", max_tokens=190, ignore_eos=True)])
        task = asyncio.create_task(read_async(box))
        await asyncio.sleep(0)
        del task

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start_and_leave())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert len(read(worker.submit([seq(3)]))) == 30
