"""What a benchmark finds, before it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["s", "tok/s", "1/s", "tokens", "MiB", "×", ""]


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. text: what it is, for people."""

    key: str
    text: str
    unit: Unit = "s"


@dataclass(slots=True)
class Samples:
    """Values by metric key; traces are points (x, y) for the plot, by name; notes are what the reader must know."""

    values: dict[str, list[float]] = field(default_factory=dict)
    traces: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, *values: float | None) -> None:
        """None is what could not be measured: left out."""
        self.values.setdefault(key, []).extend(value for value in values if value is not None)

    def trace(self, key: str, *points: tuple[float, float]) -> None:
        self.traces.setdefault(key, []).extend(points)

    def merge(self, other: "Samples") -> None:
        for key, values in other.values.items():
            self.add(key, *values)
        for key, points in other.traces.items():
            self.trace(key, *points)
        self.notes += [note for note in other.notes if note not in self.notes]


@dataclass(frozen=True, slots=True)
class TargetResult:
    name: str
    samples: Samples


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. kind: dots as they are, a line through them, or the share of points up to x ("share").

    counts: x is 1, 2, 3 …
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["dots", "line", "share"] = "dots"
    is_log: bool = False
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one benchmark. settings: what a reader needs to repeat it."""

    benchmark: str
    definitions: Sequence[str]
    settings: dict[str, object]
    metrics: Sequence[Metric]
    results: Sequence[TargetResult]
    panels: Sequence[Panel]


def share_panel(title: str, x_label: str, key: str, results: Sequence[TargetResult]) -> Panel:
    """How many of the values of a metric (seconds) lie below x; drawn in milliseconds."""
    series = [
        Series(result.name, [(value * 1e3, 0.0) for value in result.samples.values.get(key, [])]) for result in results
    ]
    return Panel(title, x_label, "share of all, %", series, "share", is_log=True)


def rounds_panel(title: str, y_label: str, key: str, results: Sequence[TargetResult], scale: float = 1e3) -> Panel:
    """The values of a metric in the order in which they were measured; seconds drawn in milliseconds."""
    series = [
        Series(result.name, [(index, v * scale) for index, v in enumerate(result.samples.values.get(key, []), 1)])
        for result in results
    ]
    return Panel(title, "measurement", y_label, series, counts=True)
