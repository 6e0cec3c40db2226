"""Real streams for the screen: a pseudo-terminal, and files."""

import os
import pty
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


class Terminal:
    """A pseudo-terminal; what was written to it is read with `shown`."""

    def __init__(self) -> None:
        self._controller, device = pty.openpty()
        attributes = termios.tcgetattr(device)
        attributes[1] &= ~termios.OPOST  # "\n" arrives as it was written
        termios.tcsetattr(device, termios.TCSANOW, attributes)
        self.stream: TextIO = os.fdopen(device, "w", encoding="utf-8")

    def shown(self) -> str:
        """All that was written; the terminal is closed."""
        self.stream.write("\0")  # so that there always is something to wait for
        self.stream.flush()
        seen = b""
        while not seen.endswith(b"\0"):
            seen += os.read(self._controller, 65_536)
        self.stream.close()
        os.close(self._controller)
        return seen[:-1].decode("utf-8")


@contextmanager
def text_file(path: Path) -> Iterator[TextIO]:
    with path.open("w", encoding="utf-8") as stream:
        yield stream
