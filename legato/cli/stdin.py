"""Text from stdin, and how long to wait for it.

A program started with an open pipe as stdin cannot know whether text will come: in `slow | legato run "sum up"` it
will, under a service or another program that merely left a pipe open it never does. So, with a PROMPT argument:

- a terminal is not read;
- a file, or a pipe with text in it or closed, is read to its end;
- a pipe that stays empty is waited for while another program of a pipeline holds its other end (Linux can say so), and
  for EMPTY_PIPE_S otherwise; then the prompt goes alone, and stderr says so.

Without a PROMPT the text can only come from stdin, so it is waited for. No wait is silent: after NOTICE_S stderr says
what is waited for and how to go on.
"""

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import click

from legato.core.errors import RequestError

NOTICE_S = 1.0
EMPTY_PIPE_S = 5.0
_PIECE = 65_536  # bytes


def read_stdin(*, has_prompt: bool, wanted: bool | None) -> str:
    """All text of stdin; "" when there is none, or none is wanted.

    wanted: True = to its end, however long that takes; False = not at all; None = by the rules above.
    Raises RequestError for text that is not UTF-8.
    """
    if sys.stdin is None or wanted is False:
        return ""
    on_terminal = sys.stdin.isatty()
    if on_terminal and not wanted:
        return ""
    pieces = _Pieces(sys.stdin.fileno())
    patient = wanted is True or not has_prompt
    raw = pieces.read_all(None if patient else EMPTY_PIPE_S, notice=not on_terminal)
    return decode_text(raw, "stdin")


def decode_text(raw: bytes, source: str) -> str:
    """UTF-8, without a byte-order mark. Raises RequestError, naming the source and the place."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start}); "
            "convert it first, for example with: iconv -f latin1 -t utf-8",
            field="prompt",
        ) from None


class _Pieces:
    """Reads on a thread: a wait for a pipe with a time limit works the same on every system that way."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: queue.SimpleQueue[bytes | OSError] = queue.SimpleQueue()
        threading.Thread(target=self._pump, name="legato-stdin", daemon=True).start()

    def read_all(self, empty_limit_s: float | None, *, notice: bool) -> bytes:
        """To the end, or b"" when nothing has come after empty_limit_s from what may never write.

        notice: say on stderr, once, when nothing has come for NOTICE_S.
        """
        pieces: list[bytes] = []
        began = time.monotonic()
        while True:
            piece = self._next(NOTICE_S if notice or empty_limit_s is not None else None)
            if piece is None:
                if not pieces and empty_limit_s is not None and _is_pipeline(self._descriptor):
                    empty_limit_s = None
                if not pieces and empty_limit_s is not None and time.monotonic() - began >= empty_limit_s:
                    _say(f"warning: nothing came on stdin for {empty_limit_s:g} s; answering the prompt alone")
                    return b""
                if notice:
                    _say(_waiting(bool(pieces), empty_limit_s))
                    notice = False
            elif piece:
                pieces.append(piece)
            else:
                return b"".join(pieces)

    def _next(self, timeout_s: float | None) -> bytes | None:
        """b"" at the end, None when nothing came in time."""
        try:
            piece = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(piece, OSError):
            raise piece
        return piece

    def _pump(self) -> None:
        try:
            while piece := os.read(self._descriptor, _PIECE):
                self._queue.put(piece)
            self._queue.put(b"")
        except OSError as error:
            self._queue.put(error)


def _waiting(has_some: bool, limit_s: float | None) -> str:
    if has_some:
        return "waiting for the end of stdin, which is still open; Ctrl-C stops"
    if limit_s is None:
        return "waiting for text on stdin; Ctrl-C stops, and < /dev/null means none"
    return (
        f"waiting up to {limit_s:g} s for text on stdin, an open pipe with nothing in it; --no-stdin or < /dev/null "
        "skips this, --stdin waits for as long as it takes"
    )


def _is_pipeline(descriptor: int) -> bool:
    """Whether a program that did not start this one holds the pipe's writing end, as in `slow | legato run`.

    Reads /proc; False where there is none, or where its owner may not be looked at.
    """
    try:
        pipe = Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return False
    if not str(pipe).startswith("pipe:"):
        return False
    starters = _ancestors()
    return any(
        int(folder.name) not in starters and _writes_to(folder, pipe)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal()
    )


def _ancestors() -> set[int]:
    """This process, and all that led to it."""
    found = set()
    process = os.getpid()
    while process > 0 and process not in found:
        found.add(process)
        try:
            # "pid (name) state ppid …", and the name may hold anything.
            process = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            break
    return found


def _writes_to(process: Path, pipe: Path) -> bool:
    with suppress(OSError, ValueError, IndexError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                if link.readlink() == pipe:
                    info = (process / "fdinfo" / link.name).read_text()
                    flags = int(info.partition("flags:")[2].split()[0], 8)
                    if flags & (os.O_WRONLY | os.O_RDWR):
                        return True
    return False


def _say(line: str) -> None:
    click.echo(line, err=True)
