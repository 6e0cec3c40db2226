"""Stop strings: nothing of a match is sent, nothing else is lost, and cuts do not matter."""

from hypothesis import given, settings
from hypothesis import strategies as st

from legato.text.stops import StopStrings
from tests.fakes import say
from tests.splits import every_split


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    stage = StopStrings(stops)
    shown = [stage.push(piece) for piece in pieces]
    return [*shown, "" if stage.matched is not None else stage.flush()], stage.matched


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule, written the slow way: grow the text until some stop string ends there; of several the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_b07_no_part_of_a_stop_string_is_sent() -> None:
    deltas, last = say([b"sum=4 #", b"EN", b"D# more"], stop=["#END#"])
    assert "".join(deltas) == "sum=4 "
    assert last.end is not None
    assert (last.end.reason, last.end.stop_sequence) == ("stop", "#END#")


def test_b08_text_before_the_stop_in_the_same_token_is_kept() -> None:
    deltas, _ = say([b"ok", b".\n"], stop=["\n"])
    assert "".join(deltas) == "ok."


def test_b09_only_what_may_still_match_is_held_back() -> None:
    shown, matched = run(["<<STOP>>"], ["plain ", "text ", "<", " b"])
    assert (shown, matched) == (["plain ", "text ", "", "< b", ""], None)


def test_b10_nothing_after_the_match() -> None:
    deltas, last = say([b"blue r", b"ed green", b" pink"], stop=["red"])
    assert deltas == ["blue "]
    assert last.end is not None
    assert last.end.usage.completion_tokens == 2


def test_b12_a_held_tail_comes_out_when_the_model_ends() -> None:
    deltas, last = say([b"abX"], stop=["XYZ"])
    assert "".join(deltas) == "abX"
    assert last.end is not None
    assert (last.end.reason, last.end.stop_sequence) == ("stop", None)


def test_b12_a_held_tail_comes_out_at_the_limit() -> None:
    deltas, last = say([b"abX", b"Y", b"Q"], stop=["XYZ"], max_tokens=2)
    assert "".join(deltas) == "abXY"
    assert last.end is not None
    assert last.end.reason == "length"


def test_every_split_gives_the_same_answer() -> None:
    for stops in (["aba"], ["ab", "abab"], ["ba", "aab"], ["b", "abb"], ["bab", "ab"]):
        for text in ("ababab", "aabbaab", "xxabax", "aaaa"):
            expected = by_definition(stops, text)
            for pieces in every_split(text):
                shown, matched = run(stops, pieces)
                assert ("".join(shown), matched) == expected, (stops, pieces)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=20))
@settings(max_examples=400, deadline=None)
def test_any_stops_any_text(stops: list[str], text: str) -> None:
    expected = by_definition(stops, text)
    for pieces in ([text], list(text), [text[:3], text[3:7], text[7:]]):
        shown, matched = run(stops, pieces)
        assert ("".join(shown), matched) == expected
