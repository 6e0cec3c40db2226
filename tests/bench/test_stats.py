import statistics

import pytest

from legato.bench.cancel import IdleWatch
from legato.bench.load import arrivals
from legato.bench.report import shown
from legato.bench.stats import Goals, gaps, gaps_between, percentile, ratio, summarize, tokens_per_s
from legato.bench.targets import Ended, Record
from legato.core.usage import Usage


def record(*piece_s: float, sent_s: float = 0.0, tokens: int | None = None) -> Record:
    usage = None if tokens is None else Usage(1, 0, tokens)
    return Record(sent_s, list(piece_s), Ended("length", usage))


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7], 0.99, 7),
        ([1, 3], 0.5, 2),
        ([5, 1, 3], 0.5, 3),
        (range(101), 0.95, 95),
        ([0, 10], 0.99, 9.9),
        ([4, 1], 1, 4),
    ],
)
def test_percentiles_by_known_numbers(values: list[float], share: float, expected: float) -> None:
    assert percentile(list(values), share) == pytest.approx(expected)


def test_percentiles_are_those_of_the_standard_library() -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.0]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, share / 100) for share in range(1, 100)] == pytest.approx(cuts)


def test_a_summary_of_nothing_is_none_and_its_percentile_an_error() -> None:
    assert summarize([]) is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_summary() -> None:
    found = summarize([4, 1, 1, 2])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.min, found.max) == (4, 2, 1.5, 1, 4)


def test_ratio_is_of_the_medians() -> None:
    assert ratio([1, 2, 300], [4]) == 0.5
    assert ratio([1], []) is None and ratio([1], [0, 0]) is None


def test_gaps_count_in_full_when_they_touch_the_time_that_is_looked_at() -> None:
    times = [0.0, 1.0, 4.0, 4.5, 9.0, 10.0]
    assert gaps(times) == [1, 3, 0.5, 4.5, 1]
    assert gaps_between(times, 2.0, 5.0) == [(4.0, 3.0), (4.5, 0.5), (9.0, 4.5)]
    assert gaps_between(times, 2.0, 3.0) == [(4.0, 3.0)]
    assert gaps_between(times, 4.0, 4.5) == [(4.5, 0.5)]


@pytest.mark.parametrize(
    ("one", "met"),
    [
        (record(1.0, 1.2, 1.4), True),
        (record(1.1, 1.2), False),
        (record(0.5, 0.71), False),
        (record(0.5), True),
        (record(), False),
        (record(10.5, 10.6, sent_s=10.0), True),
    ],
)
def test_goodput_counts_what_met_both_targets(one: Record, met: bool) -> None:
    assert Goals(ttft_s=1.0, gap_s=0.2001).met_by(one) is met


def test_the_speed_of_a_stream_is_by_tokens_where_they_are_told() -> None:
    assert tokens_per_s(record(1.0, 2.0, 3.0)) == 1
    assert tokens_per_s(record(1.0, 2.0, 3.0, tokens=5)) == 2
    assert tokens_per_s(record(1.0)) is None and tokens_per_s(record(1.0, 1.0)) is None


def watch(*used_s: float) -> float | None:
    """CPU seconds used, every 10 ms from 100 on."""
    looking = IdleWatch(window_s=0.05, share=0.25)
    found = (looking.push(100 + index / 100, used) for index, used in enumerate(used_s))
    return next((at for at in found if at is not None), None)


def test_idle_is_the_begin_of_the_first_quiet_window() -> None:
    busy = [index / 100 for index in range(10)]
    assert watch(*busy) is None
    assert watch(*busy, *[0.09] * 7) == pytest.approx(100.08, abs=0.011)
    assert watch(*[5.0] * 7) == 100
    assert watch(*[5.0] * 3) is None  # not watched for long enough
    assert watch(5.0, 5.0, 5.01, *[5.01] * 4) == 100  # one tick in the window is not work


def test_arrivals_are_a_seeded_poisson_process() -> None:
    times = arrivals("seed", 4.0, 4000)
    assert times == arrivals("seed", 4.0, 4000) != arrivals("other", 4.0, 4000)
    assert times == sorted(times) and times[0] == 0
    between = gaps(times)
    assert statistics.fmean(between) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(between) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.0123, "s", "12.3 ms"), (4.3, "s", "4.30 s"), (1234.5, "tok/s", "1,234 tok/s"), (0, "s", "0 ms"), (3, "", "3")],
)
def test_numbers_as_people_read_them(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text
