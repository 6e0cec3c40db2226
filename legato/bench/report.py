"""An outcome as a table, and as JSON. Needs rich."""

import math
import os
import platform
from collections.abc import Sequence
from typing import Any, TextIO

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from legato._version import __version__
from legato.bench.results import Metric, Outcome, TargetResult
from legato.bench.stats import as_json, percentile, ratio, summarize

_PIPE_WIDTH = 140  # columns where there is no terminal to fit
_SHARES = (0.5, 0.95, 0.99, 1.0)


def print_table(outcome: Outcome, out: TextIO) -> None:
    """One line per metric and target; with two targets also the ratio of their medians, the first ÷ the second."""
    console = Console(file=out, width=None if out.isatty() else _PIPE_WIDTH, highlight=False)
    compared = len(outcome.results) == 2
    table = Table(title=Text(f"legato bench {outcome.benchmark}"), title_justify="left")
    table.add_column("what")
    table.add_column("where")
    for name in ("n", "p50", "p95", "p99", "max", *(["ratio of p50"] if compared else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for metric in outcome.metrics:
        if any(result.samples.values.get(metric.key) for result in outcome.results):
            _add_rows(table, metric, outcome.results, compared)
    console.print(table)
    for line in (*outcome.definitions, *_notes(outcome)):
        console.print(Text(line))


def _add_rows(table: Table, metric: Metric, results: Sequence[TargetResult], compared: bool) -> None:
    for place, result in enumerate(results):
        values = result.samples.values.get(metric.key, [])
        cells = [Text(metric.text if place == 0 else ""), Text(result.name), Text(str(len(values)))]
        cells += [Text(shown(percentile(values, share), metric.unit) if values else "–") for share in _SHARES]
        if compared:
            by = _ratio(metric, results) if place == 0 else None
            cells.append(Text("" if by is None else f"{by:.3g} ×"))
        table.add_row(*cells, end_section=place == len(results) - 1)


def _ratio(metric: Metric, results: Sequence[TargetResult]) -> float | None:
    first, second = (result.samples.values.get(metric.key, []) for result in results)
    return ratio(first, second)


def _notes(outcome: Outcome) -> list[str]:
    notes = [f"Note: {note}." for result in outcome.results for note in result.samples.notes]
    if len(outcome.results) == 2:
        notes.insert(0, f"Ratio: {outcome.results[0].name} ÷ {outcome.results[1].name}.")
    return notes


def shown(value: float, unit: str) -> str:
    """Three or four digits and the unit; seconds below 1 as milliseconds."""
    if unit == "s" and abs(value) < 1:
        value, unit = value * 1e3, "ms"
    digits = 3 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    number = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.{min(digits, 3)}f}"
    return f"{number} {unit}".rstrip()


def json_value(outcome: Outcome) -> dict[str, Any]:
    """Everything, the single values included. Units are those of `units`."""
    value: dict[str, Any] = {
        "benchmark": outcome.benchmark,
        "legato": __version__,
        "machine": _machine(),
        "settings": outcome.settings,
        "definitions": list(outcome.definitions),
        "units": {metric.key: metric.unit for metric in outcome.metrics},
        "targets": [_target_value(result, outcome.metrics) for result in outcome.results],
    }
    if len(outcome.results) == 2:
        value["ratios"] = {metric.key: _ratio(metric, outcome.results) for metric in outcome.metrics}
    return value


def _target_value(result: TargetResult, metrics: Sequence[Metric]) -> dict[str, Any]:
    values = result.samples.values
    return {
        "name": result.name,
        "metrics": {
            metric.key: as_json(summarize(values.get(metric.key, []))) | {"values": values.get(metric.key, [])}
            for metric in metrics
        },
        "traces": result.samples.traces,
        "notes": result.samples.notes,
    }


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
    }
