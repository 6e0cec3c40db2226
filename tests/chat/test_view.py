import sys
import time
from pathlib import Path

import pytest

from legato.chat.view import AnswerWriter, Notices, WaitNote, stats_line, wants_colour
from legato.core.events import FinishReason
from legato.core.usage import Timing, Usage
from tests.splits import every_split

if sys.platform == "win32":
    pytest.skip("pseudo-terminals", allow_module_level=True)

from tests.chat.terminals import Terminal, text_file

HOSTILE = "a\x1b[31mred\x1b]0;title\x07\r\x08\x7f\x9b2Jé🦙\tz\nend"
SHOWN = "a␛[31mred␛]0;title␇␍␈␡\ufffd2Jé🦙\tz\nend"


@pytest.fixture(autouse=True)
def a_capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_terminal_is_shown_control_characters_and_obeys_none() -> None:
    terminal = Terminal()
    writer = AnswerWriter(terminal.stream)
    writer.write(HOSTILE)
    writer.end()
    assert terminal.shown() == SHOWN + "\n"


def test_pieces_are_shown_as_the_whole_is() -> None:
    for chunks in every_split("\x1b[1m\r\né"):
        terminal = Terminal()
        writer = AnswerWriter(terminal.stream)
        for chunk in chunks:
            writer.write(chunk)
        assert terminal.shown() == "␛[1m␍\né"


def test_a_file_gets_the_bytes_as_they_are_and_nothing_more(tmp_path: Path) -> None:
    with text_file(tmp_path / "answer") as stream:
        writer = AnswerWriter(stream)
        writer.write(HOSTILE)
        assert (tmp_path / "answer").read_bytes() == HOSTILE.encode()  # at once, not at the end
        writer.end()
    assert (tmp_path / "answer").read_bytes() == HOSTILE.encode()


def test_bytes_are_utf8_whatever_the_streams_encoding(tmp_path: Path) -> None:
    with (tmp_path / "answer").open("w", encoding="ascii") as stream:
        AnswerWriter(stream).write("é🦙")
    assert (tmp_path / "answer").read_bytes() == "é🦙".encode()


@pytest.mark.parametrize(("written", "shown"), [("", ""), ("a\n", "a\n"), ("a", "a\n"), ("\n", "\n")])
def test_the_last_line_is_ended_once(written: str, shown: str) -> None:
    terminal = Terminal()
    writer = AnswerWriter(terminal.stream)
    writer.write(written)
    writer.end()
    writer.end()
    assert terminal.shown() == shown


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_b70_colour_by_rule(variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    assert wants_colour(terminal.stream) is expected
    Notices(terminal.stream).dim("note")
    assert terminal.shown() == ("\x1b[2mnote\x1b[0m\n" if expected else "note\n")


def test_b70_no_colour_in_a_file(tmp_path: Path) -> None:
    with text_file(tmp_path / "log") as stream:
        Notices(stream).dim("note")
        WaitNote("loading", 0, stream).share(0.5)
    assert (tmp_path / "log").read_text() == "note\n"


def test_a_wait_note_is_drawn_when_due_and_taken_away() -> None:
    terminal = Terminal()
    note = WaitNote("loading", 0, terminal.stream)
    note.share(0.25)
    note.clear()
    until = time.monotonic() + 0.2  # longer than the pause between two drawings
    while time.monotonic() < until:
        note.share(0.5)
    note.clear()
    shown = terminal.shown()
    assert shown.endswith("loading 25%\x1b[K\r\x1b[K") and "50%" not in shown


def test_a_short_wait_leaves_nothing() -> None:
    terminal = Terminal()
    note = WaitNote("loading", 3600, terminal.stream)
    note.share(0.25)
    note.clear()
    assert terminal.shown() == ""


def test_stats_line() -> None:
    timing = Timing(0.0, 0.0854, 0.01, 0.02, decode_s=0.5, total_s=0.6, completion_tokens=51)
    line = stats_line(Usage(38, 20, 51), timing, FinishReason.STOP)
    assert line == "ttft 85 ms · 100 tok/s · 51 tokens · prompt 38, 20 cached"
    nothing = Timing(0.0, None, None, None, decode_s=0.0, total_s=0.6, completion_tokens=0)
    line = stats_line(Usage(38, 0, 0), nothing, FinishReason.CANCELLED)
    assert line == "no text · 0 tokens · prompt 38, 0 cached · stopped"
