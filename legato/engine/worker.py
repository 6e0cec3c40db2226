"""The one thread that owns libllama, and its two doors.

In: a SimpleQueue of commands; putting never blocks. The thread waits on it only when the engine is idle, else it takes
what is there between steps, so a cancel takes effect within one step.
Out: each request's Mailbox. Blocking readers are woken by its condition; event loops by one call_soon_threadsafe per
loop and delivery, however many streams it feeds.

Death: whatever ends the thread is given to every reader, and to every later submit. Nothing hangs.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from legato.core.errors import EngineError, OverloadedError
from legato.engine.config import EngineConfig
from legato.engine.engine import Engine
from legato.engine.mailbox import Mailbox, copy_of
from legato.engine.sequence import Sequence, SequenceOutput


@dataclass(frozen=True, slots=True)
class _Submit:
    sequences: list[Sequence]
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Resume:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = _Submit | _Cancel | _Resume | _Close


class EngineWorker:
    """Start it once; submit and cancel from any thread."""

    def __init__(self, engine: Engine, config: EngineConfig, num_slots: int, on_exit: Callable[[], None]) -> None:
        """on_exit runs on the engine thread after its last step: free what the decoder holds there."""
        self._engine = engine
        self._unread_limit = config.unread_limit
        self._most_open = num_slots + config.max_queue
        self._num_open = 0  # sequences that were submitted and have not ended
        self._on_exit = on_exit
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._lock = threading.Lock()  # makes "dead?" and "put" one step, so that no submit is lost at the end
        self._error: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="legato-engine", daemon=True)
        self._thread.start()

    @property
    def num_steps(self) -> int:
        """Steps made so far; stands still when nobody is served."""
        return self._engine.num_steps

    @property
    def is_idle(self) -> bool:
        """Nobody is being served and no command waits: a snapshot, for displays and tests."""
        return self._engine.idle and self._commands.empty()

    def submit(self, sequences: list[Sequence]) -> Mailbox:
        """Start a request: one sequence per choice, all with one request id.

        Raises OverloadedError when the queue is full, EngineError after a death.
        """
        request_id = sequences[0].request_id
        mailbox = Mailbox(request_id, len(sequences), self._unread_limit, lambda: self._put(_Resume(request_id)))
        with self._lock:
            if self._error is not None:
                raise copy_of(self._error)
            if not self._thread.is_alive():
                raise EngineError("the model was opened in another process; open it again in this one")
            if self._num_open + len(sequences) > self._most_open:
                raise OverloadedError(
                    f"{self._num_open} generations run or wait, and {self._most_open} is the most; try again later"
                )
            self._num_open += len(sequences)
            self._put(_Submit(sequences, mailbox))
        return mailbox

    def cancel(self, request_id: str) -> None:
        """End a request between two steps; unknown and finished ids are ignored."""
        self._put(_Cancel(request_id))

    def close(self) -> None:
        """End the thread; running requests get an EngineError. Waits for the step that is under way."""
        self._put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, command: _Command) -> None:
        self._commands.put(command)

    def _run(self) -> None:
        error = EngineError("the model was closed")
        try:
            while self._drain():
                self._engine.step(self._deliver)
        except Exception as exc:
            error = exc if isinstance(exc, EngineError) else EngineError(f"the engine failed: {exc!r}")
            error.__cause__ = exc if error is not exc else exc.__cause__
        finally:
            self._fail_all(error)
            self._on_exit()

    def _drain(self) -> bool:
        """Apply all commands that wait. Blocks while the engine is idle. False: close."""
        while not self._commands.empty() or self._engine.idle:
            try:
                command = self._next_command()
            except queue.Empty:
                return True
            match command:
                case _Submit(sequences, mailbox):
                    self._mailboxes[mailbox.request_id] = mailbox
                    for seq in sequences:
                        self._engine.submit(seq)
                case _Cancel(request_id):
                    self._deliver(self._engine.cancel(request_id))
                case _Resume(request_id):
                    self._engine.resume(request_id)
                case _Close():
                    return False
        return True

    def _next_command(self) -> _Command:
        """Raises queue.Empty when the engine has work, or a deadline came."""
        if not self._engine.idle:
            return self._commands.get_nowait()
        deadline = self._engine.next_deadline
        wait_s = None if deadline is None else min(max(0.0, deadline - self._engine.clock()), threading.TIMEOUT_MAX)
        return self._commands.get(timeout=wait_s)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        boxes = []
        ended = sum(output.end is not None for output in outputs)
        if ended:
            with self._lock:
                self._num_open -= ended
        for output in outputs:
            mailbox = self._mailboxes[output.request_id]
            if mailbox.put(output):
                self._engine.park(output.request_id)
            if mailbox.is_done:
                del self._mailboxes[output.request_id]
            boxes.append(mailbox)
        self._wake(boxes)

    def _wake(self, mailboxes: list[Mailbox]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for mailbox in mailboxes:
            if (waiter := mailbox.take_waiter()) is not None:
                by_loop.setdefault(waiter[0], []).append(waiter[1])
        for loop, futures in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set_all, futures)
            except RuntimeError:  # that loop is closed: its readers are gone, and their streams cancel themselves
                continue

    def _fail_all(self, error: EngineError) -> None:
        with self._lock:
            self._error = error
            while True:  # requests that came after the last drain
                try:
                    command = self._commands.get_nowait()
                except queue.Empty:
                    break
                if isinstance(command, _Submit):
                    self._mailboxes[command.mailbox.request_id] = command.mailbox
        mailboxes = list(self._mailboxes.values())
        self._mailboxes.clear()
        for mailbox in mailboxes:
            mailbox.fail(error)
        self._wake(mailboxes)


def _set_all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
