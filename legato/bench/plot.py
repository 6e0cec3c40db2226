"""An outcome as a picture. Needs matplotlib; opens no window."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from legato.bench.results import Outcome, Panel, Series

_COLOURS = ("#0b6e99", "#d9730d", "#4d6461", "#ad1a72")
_MARKERS = ("o", "s", "^", "D")
_PANEL_INCHES = (6.4, 4.2)
_LEAST = 0.01  # ms; a log axis has no 0, and two pieces can come at once


def save_plot(outcome: Outcome, path: Path) -> None:
    """Write a PNG, one pair of axes per panel, side by side. Raises OSError when it cannot be written."""
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(outcome.panels), height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"legato bench {outcome.benchmark}")
    for axes, panel in zip(figure.subplots(1, len(outcome.panels), squeeze=False)[0], outcome.panels, strict=True):
        _draw(axes, panel)
    figure.savefig(path, format="png", dpi=120)


def _draw(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=True, which="both", alpha=0.25)
    drawn = [series for series in panel.series if series.points]
    for place, series in enumerate(drawn):
        _draw_series(axes, panel, series, place)
    if not drawn:
        axes.text(0.5, 0.5, "no measurement", ha="center", va="center", transform=axes.transAxes)
        return
    _scale(axes, panel)
    axes.legend(fontsize="small")


def _draw_series(axes: Any, panel: Panel, series: Series, place: int) -> None:
    colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
    x = [point[0] for point in series.points]
    y = [max(point[1], _LEAST) if panel.is_log else point[1] for point in series.points]
    label = series.label.replace("$", r"\$")  # it could be read as a formula
    match panel.kind:
        case "share":
            axes.ecdf([max(value, _LEAST) for value in x], label=label, color=colour)
        case "line":
            axes.plot(x, y, label=label, color=colour, marker=marker, markersize=4)
        case "dots":
            axes.plot(x, y, label=label, color=colour, marker=marker, markersize=4, linestyle="none", alpha=0.8)


def _plain(value: float, _place: int | None) -> str:
    return f"{value:g}"


def _scale(axes: Any, panel: Panel) -> None:
    if panel.kind == "share":
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f}")
    if panel.is_log:
        axis = axes.xaxis if panel.kind == "share" else axes.yaxis
        (axes.set_xscale if panel.kind == "share" else axes.set_yscale)("log")
        axis.set_major_formatter(_plain)
        low, high = axis.get_view_interval()
        axis.set_minor_formatter(_plain if high < 8 * low else NullFormatter())  # a wide axis has labels enough
    elif panel.kind != "share":
        axes.set_ylim(bottom=0)
    if panel.counts:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0.5, max(point[0] for series in panel.series for point in series.points) + 0.5)
