"""What goes to the terminal. Answers are bytes on stdout; everything else is text on stderr."""

import os
import sys
import threading
import time
from typing import TextIO

from legato.core.events import FinishReason
from legato.core.usage import Timing, Usage

# Control characters as their pictures: what a model writes is shown, never obeyed. C1 (0x80 to 0x9f) has no pictures.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def is_plain() -> bool:
    """The terminal obeys no escape sequences (TERM=dumb)."""
    return os.environ.get("TERM") == "dumb"


def wants_colour(stream: TextIO | None) -> bool:
    """On a terminal that can, unless NO_COLOR says otherwise (no-color.org: any value but the empty one)."""
    return is_terminal(stream) and not is_plain() and not os.environ.get("NO_COLOR")


class AnswerWriter:
    """Answer text to stdout, as UTF-8 whatever the locale, flushed piece by piece.

    On a terminal control characters are made visible and the last line is ended; elsewhere the bytes are the answer's.
    Raises BrokenPipeError when the reader has gone, OSError when the bytes cannot be written.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        if stream is None:
            raise OSError("stdout is closed; there is nowhere to write the answer")
        self._bytes = stream.buffer
        self.on_terminal = is_terminal(stream)
        self._ends_open = False  # the last line has no end yet

    def write(self, text: str) -> None:
        if not text:
            return
        self._ends_open = not text.endswith("\n")
        self._put(text.translate(_SHOWN) if self.on_terminal else text)

    def end(self) -> None:
        """The answer is over: what follows on this terminal begins on a line of its own."""
        if self.on_terminal and self._ends_open:
            self._put("\n")
        self._ends_open = False

    def _put(self, text: str) -> None:
        self._bytes.write(text.encode("utf-8", "replace"))
        self._bytes.flush()


class Notices:
    """Lines for the person: status, notes, errors."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._colour = wants_colour(self._stream)

    def dim(self, text: str) -> None:
        self.say(f"\x1b[2m{text}\x1b[0m" if self._colour else text)

    def say(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text + "\n")
            self._stream.flush()

    def error(self, text: str) -> None:
        self.say(f"error: {text}")


class WaitNote:
    """A line that says what takes so long: on a terminal only, and only after a while; it goes when the wait ends.

    Made by a timer's thread and by the waiting one; the lock keeps it from being drawn after `clear`.
    """

    def __init__(self, text: str, after_s: float, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._text = text
        self._due = time.monotonic() + after_s
        self._is_drawn = False
        self._is_over = not is_terminal(self._stream)
        self._lock = threading.Lock()
        self._timer = threading.Timer(after_s, self._draw, args=[text])
        self._timer.daemon = True
        if not self._is_over:
            self._timer.start()

    def share(self, done: float) -> None:
        """How much is done, 0 to 1."""
        if not is_plain() and time.monotonic() >= self._due:
            self._due += 0.1  # ten times a second is enough for the eye
            self._draw(f"{self._text} {done:.0%}")

    def clear(self) -> None:
        """Take the line away. Harmless when it was never drawn, and when called again."""
        with self._lock:
            if self._is_drawn and not is_plain():
                self._put("\r\x1b[K")
            self._is_over = True
            self._is_drawn = False
        self._timer.cancel()

    def _draw(self, text: str) -> None:
        with self._lock:
            if not self._is_over:
                self._put(f"{text}\n" if is_plain() else f"\r{text}\x1b[K")
                self._is_drawn = True

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def stats_line(usage: Usage, timing: Timing, reason: FinishReason) -> str:
    """One answer in figures: `ttft 85 ms · 142 tok/s · 24 tokens · prompt 38, 20 cached`."""
    parts = ["no text" if timing.ttft_s is None else f"ttft {timing.ttft_s * 1000:.0f} ms"]
    if timing.tokens_per_s is not None:
        parts.append(f"{timing.tokens_per_s:.0f} tok/s")
    parts.append(f"{usage.completion_tokens} token{'' if usage.completion_tokens == 1 else 's'}")
    parts.append(f"prompt {usage.prompt_tokens}, {usage.cached_tokens} cached")
    if reason is not FinishReason.STOP:
        parts.append({FinishReason.LENGTH: "cut by a limit", FinishReason.CANCELLED: "stopped"}[reason])
    return " · ".join(parts)
