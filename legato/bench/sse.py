"""Server-sent events, as the HTML standard reads them: any line end, comments, several data lines, any chunking."""

from dataclasses import dataclass

from legato.bench.errors import BenchError

MAX_EVENT_BYTES = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """name: of its `event:` line, `message` without one. data: its data lines, joined by line ends."""

    name: str
    data: str


class SseParser:
    """push() the bytes as they come; flush() at the end gives an event whose empty line is missing.

    Both raise BenchError for an event of more than MAX_EVENT_BYTES.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_cr = False  # a line feed that comes now belongs to the line end before
        self._is_start = True
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def push(self, chunk: bytes) -> list[ServerEvent]:
        events: list[ServerEvent] = []
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if chunk.endswith(b"\r"):
            self._after_cr = True
        *lines, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._grow(line)
            events += self._end_line()
        self._grow(rest)
        return events

    def flush(self) -> list[ServerEvent]:
        return [*self._end_line(), *self._end_event()]

    def _grow(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > MAX_EVENT_BYTES:
            raise BenchError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes; is it an OpenAI server?")
        self._line += part

    def _end_line(self) -> list[ServerEvent]:
        raw = bytes(self._line)
        self._line.clear()
        if self._is_start:
            raw, self._is_start = raw.removeprefix(_BOM), False
        if not raw:
            return self._end_event()
        field, _, value = raw.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        elif not self._data:
            self._size = 0  # comments and unknown fields are not kept
        return []

    def _end_event(self) -> list[ServerEvent]:
        data, name = self._data, self._name or "message"
        self._data, self._name, self._size = [], "", 0
        return [ServerEvent(name, "\n".join(data))] if data else []
