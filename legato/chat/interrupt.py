"""Ctrl-C, by what is going on.

An exception out of a signal handler can hit any line, the clean-up of an earlier one included. So the handler raises
only at the prompt, and disarms itself before it does; everywhere else it asks the running answer to stop, which is
safe to ask at any time and as often as one likes.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class InterruptGuard:
    """Owns SIGINT for as long as the `with` block lasts. Main thread only."""

    def __init__(self, *, kill_on_second: bool = False) -> None:
        """kill_on_second: a second Ctrl-C during an answer ends the process at once; else it changes nothing."""
        self._kill_on_second = kill_on_second
        self._at_prompt = False
        self._cancel: Callable[[], None] | None = None
        self._previous: Any = None
        self.was_hit = False  # since the last `answering` began

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_exc: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def prompting(self) -> Iterator[None]:
        """In here Ctrl-C raises KeyboardInterrupt, once."""
        self._at_prompt = True
        try:
            yield
        finally:
            self._at_prompt = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """In here Ctrl-C cancels what is attached; one that came before `attach` counts too."""
        self.was_hit = False
        try:
            yield
        finally:
            self._cancel = None

    def attach(self, cancel: Callable[[], None]) -> None:
        """cancel: safe to call in a signal handler, and more than once."""
        self._cancel = cancel
        if self.was_hit:
            cancel()

    def _on_sigint(self, _number: int, _frame: FrameType | None) -> None:
        if self._at_prompt:
            self._at_prompt = False
            raise KeyboardInterrupt
        self.was_hit = True
        if self._kill_on_second:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._cancel is not None:
            self._cancel()


@contextmanager
def interrupt_kills() -> Iterator[None]:
    """In here Ctrl-C ends the process at once.

    For loading: native code runs, and calls back into Python from where an exception cannot come out.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
