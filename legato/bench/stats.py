"""Numbers out of samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legato.bench.targets import Record


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share (0 to 1) of the values lies, interpolated linearly between neighbours.

    Raises ValueError when there are no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one metric; all fields but count are in the metric's unit."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    min: float
    max: float


def summarize(values: Sequence[float]) -> Summary | None:
    """None without values."""
    if not values:
        return None
    p50, p95, p99 = (percentile(values, share) for share in (0.5, 0.95, 0.99))
    return Summary(len(values), math.fsum(values) / len(values), p50, p95, p99, min(values), max(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Of the medians; None when one side has none, or theirs is 0."""
    if not ours or not theirs or percentile(theirs, 0.5) == 0:
        return None
    return percentile(ours, 0.5) / percentile(theirs, 0.5)


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def gaps_between(times: Sequence[float], begin: float, end: float) -> list[tuple[float, float]]:
    """(the time at which it ended, its length) of each gap that has a part between begin and end.

    A gap that began before, or ends after, counts in full: that is how long the reader waited.
    """
    return [(after, after - before) for before, after in pairwise(times) if after > begin and before < end]


@dataclass(frozen=True, slots=True)
class Goals:
    """What a request must meet to count for goodput, in seconds."""

    ttft_s: float
    gap_s: float

    def met_by(self, record: Record) -> bool:
        ttft = record.ttft_s
        return ttft is not None and ttft <= self.ttft_s and max(gaps(record.piece_s), default=0.0) <= self.gap_s


def tokens_per_s(record: Record) -> float | None:
    """Of one stream, from its first piece to its last; None with fewer than two pieces."""
    if len(record.piece_s) < 2 or record.piece_s[-1] <= record.piece_s[0]:
        return None
    return (record.num_tokens - 1) / (record.piece_s[-1] - record.piece_s[0])


def as_json(summary: Summary | None) -> dict[str, Any]:
    if summary is None:
        return {"count": 0}
    return {name: getattr(summary, name) for name in ("count", "mean", "p50", "p95", "p99", "min", "max")}
