"""Where one request's outputs wait for their reader, on whatever thread or event loop that is."""

import asyncio
import threading
from collections.abc import Callable

from legato.core.errors import EngineError
from legato.engine.sequence import SequenceOutput


class Mailbox:
    """Written by the engine thread, read by one reader, blocking or on an event loop.

    A reader that falls behind finds all that came since in one list (it merges the text); when more than `unread_limit`
    tokens wait, `put` says so and the engine parks the request until the box is emptied.
    """

    def __init__(self, request_id: str, num_sequences: int, unread_limit: int, on_emptied: Callable[[], None]) -> None:
        self.request_id = request_id
        self._open_ends = num_sequences
        self._unread_limit = unread_limit
        self._on_emptied = on_emptied
        self._changed = threading.Condition()
        self._outputs: list[SequenceOutput] = []
        self._num_unread = 0
        self._is_parked = False
        self._error: EngineError | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def is_done(self) -> bool:
        """Every sequence has ended, or the engine has; what came before may still be unread."""
        return self._open_ends == 0 or self._error is not None

    def put(self, output: SequenceOutput) -> bool:
        """[engine] True when the reader is too far behind: the engine parks the request."""
        with self._changed:
            self._outputs.append(output)
            self._num_unread += len(output.token_ids)
            if output.end is not None:
                self._open_ends -= 1
            is_full = self._num_unread > self._unread_limit and not self.is_done
            self._is_parked |= is_full
            self._changed.notify_all()
            return is_full

    def fail(self, error: EngineError) -> None:
        """[engine] The reader gets what came before, then this error."""
        with self._changed:
            if not self.is_done:
                self._error = error
            self._changed.notify_all()

    def take_waiter(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None:
        """[engine] The event loop that is to be woken, once."""
        with self._changed:
            waiter, self._waiter = self._waiter, None
            return waiter

    def get(self) -> list[SequenceOutput]:
        """Block until something came and take all of it; [] after the last end.

        Raises EngineError when the engine died before the last end.
        """
        with self._changed:
            while not self._is_ready():
                self._changed.wait()
            return self._take()

    async def get_async(self) -> list[SequenceOutput]:
        """`get` for an event loop."""
        while True:
            with self._changed:
                if self._is_ready():
                    return self._take()
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiter = (loop, future)
            await future

    def _is_ready(self) -> bool:
        return bool(self._outputs) or self.is_done

    def _take(self) -> list[SequenceOutput]:
        if not self._outputs and self._error is not None:
            raise copy_of(self._error)
        outputs, self._outputs = self._outputs, []
        self._num_unread = 0
        if self._is_parked:
            self._is_parked = False
            self._on_emptied()
        return outputs


def copy_of(error: EngineError) -> EngineError:
    """One to raise: the traceback of a shared error would grow with every reader that raises it."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
