"""Bytes to characters, whatever the token boundaries."""

from hypothesis import given, settings
from hypothesis import strategies as st

from legato.text.detokenizer import Detokenizer
from tests.fakes import say
from tests.splits import every_split


def run(pieces: list[bytes], *, strip: bool = False) -> list[str]:
    stage = Detokenizer(strip_space_prefix=strip)
    return [*(stage.push(piece) for piece in pieces), stage.flush()]


def test_b01_character_over_several_tokens() -> None:
    assert run([b"\xe7\x95", b"\x8c!"]) == ["", "界!", ""]
    assert run([b"\xe5", b"\xa4", b"\xa9"]) == ["", "", "天", ""]


def test_b01_through_the_engine_nothing_is_sent_before_the_character_is_whole() -> None:
    deltas, last = say([b"\xe7\x95", b"\x8c!", b"\xe5", b"\xa4", b"\xa9"])
    assert deltas == ["界!", "天"]
    assert last.end is not None
    assert last.end.usage.completion_tokens == 5


def test_b02_invalid_byte_then_text() -> None:
    assert "".join(run([b"\xff", b" ok"])) == "\ufffd ok"
    deltas, last = say([b"\xff", b" ok", b"!"])
    assert "".join(deltas) == "\ufffd ok!"
    assert last.end is not None
    assert last.end.reason == "stop"


def test_b03_limit_inside_a_character_drops_the_half() -> None:
    deltas, last = say([b"\xf0\x9f", b"\xa6\x99"], max_tokens=1)
    assert deltas == []
    assert last.end is not None
    assert (last.end.reason, last.text) == ("length", "")
    deltas, _ = say([b"ab\xf0\x9f", b"\xa6\x99"], max_tokens=1)
    assert deltas == ["ab"]


def test_b05_one_dummy_space_only_at_the_very_start_and_only_where_one_is_added() -> None:
    assert "".join(run([b" one", b" two"], strip=True)) == "one two"
    assert "".join(run([b" ", b" x"], strip=True)) == " x"
    assert "".join(run([b" one", b" two"], strip=False)) == " one two"
    assert "".join(run([b"", b" one"], strip=True)) == "one"  # a control token has no bytes and is not the start


def test_every_split_gives_the_same_text() -> None:
    raw = "aé界🦙".encode() + b"\xff\xe7\x95" + b"z"
    expected = raw.decode("utf-8", "replace")
    for pieces in every_split(raw):
        assert "".join(run(pieces)) == expected


@given(st.binary(max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_any_bytes_any_split(raw: bytes, rng: object) -> None:
    whole = "".join(run([raw]))
    assert "".join(run([raw[i : i + 1] for i in range(len(raw))])) == whole
    # Only an unfinished character at the very end may differ from decoding the whole: it is dropped.
    assert raw.decode("utf-8", "replace").startswith(whole)
    assert raw.decode("utf-8", "replace").removeprefix(whole).strip("\ufffd") == ""
