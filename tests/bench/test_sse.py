import pytest

from legato.bench import sse
from legato.bench.errors import BenchError
from legato.bench.sse import ServerEvent, SseParser
from tests.splits import every_split

MESSAGES = [ServerEvent("message", "ä"), ServerEvent("error", "1\n2")]


def parse(chunks: list[bytes]) -> list[ServerEvent]:
    parser = SseParser()
    events = [event for chunk in chunks for event in parser.push(chunk)]
    return events + parser.flush()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "\n"], ids=["no last empty line", "complete"])
def test_events_do_not_depend_on_chunks_or_line_ends(end: str, last: str) -> None:
    text = f": hello\nid: 4\ndata: ä\n\n:\n\nevent: error\ndata:1\ndata: 2\n{last}".replace("\n", end)
    for chunks in every_split(text.encode()):
        assert parse(chunks) == MESSAGES, chunks


def test_short_streams_at_every_split() -> None:
    for chunks in every_split(b"data:a\r\n\r\n\n"):
        assert parse(chunks) == [ServerEvent("message", "a")]


def test_a_byte_order_mark_is_no_text() -> None:
    for chunks in every_split(b"\xef\xbb\xbfdata:x\n\n"):
        assert parse(chunks) == [ServerEvent("message", "x")]


@pytest.mark.parametrize(
    ("raw", "data"),
    [(b"data\n\n", [""]), (b"data:  x\n\n", [" x"]), (b"event: a\n\n", []), (b"", []), (b"data: \xff\n\n", ["\ufffd"])],
)
def test_corners(raw: bytes, data: list[str]) -> None:
    assert [event.data for event in parse([raw])] == data


def test_an_event_arrives_with_its_empty_line_not_later() -> None:
    parser = SseParser()
    assert parser.push(b"data: x\r\n") == []
    assert parser.push(b"\r") == [ServerEvent("message", "x")]
    assert parser.push(b"\ndata: y\n\n") == [ServerEvent("message", "y")]


def test_an_event_without_end_is_refused_and_pings_without_end_are_not() -> None:
    with pytest.raises(BenchError, match="bytes"):
        parse([b"data: " + b"x" * sse.MAX_EVENT_BYTES])
    parser = SseParser()
    for _ in range(9):
        assert parser.push(b": " + b"." * (sse.MAX_EVENT_BYTES // 8) + b"\n") == []
