"""What is going on, on stderr: one line that changes on a terminal, else a line now and then."""

import os
import shutil
import time
from typing import TextIO

_LINES_EVERY_S = 1.0  # where lines stay


class Progress:
    """say() what is being done; clear() before anything else is written."""

    def __init__(self, out: TextIO | None) -> None:
        """out: None when there is no stderr."""
        self._out = out
        self._rewrites = out is not None and out.isatty() and os.environ.get("TERM") != "dumb"
        self._last_s: float | None = None
        self._begin_s = time.monotonic()

    def say(self, text: str) -> None:
        text = "".join(c if c.isprintable() else "?" for c in text)
        now = time.monotonic()
        if self._rewrites:
            line = f"{now - self._begin_s:5.0f} s  {text}"
            self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        elif self._last_s is None or now - self._last_s >= _LINES_EVERY_S:
            self._write(f"{text}\n")
            self._last_s = now

    def clear(self) -> None:
        if self._rewrites:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            self._out = None  # nobody reads it; the measurement goes on
