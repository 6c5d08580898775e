"""Plots of a report: throughput and three latencies over load, one row of panels per sweep. One PNG of all, or an SVG
of each panel for the page."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight_client.load_test.report import sweeps, title
from inflight_client.load_test.results import LevelResult, Percentiles
from inflight_client.load_test.runner import LoadTestReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

DrawPanel = Callable[["Axes", Sequence[LevelResult]], None]
_INK, _MUTED, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_TOKENS, _REQUESTS = "#2563a6", "#d97706"
# One hue, darker for higher percentiles: the three lines of a panel show one quantity.
_PERCENTILES = (("p50", "#7fb3dd"), ("p90", "#3b7fbf"), ("p99", "#123d6b"))
COLOURS = {
    _INK: "--ink",
    _MUTED: "--muted",
    _GRID: "--line",
    _TOKENS: "--tokens",
    _REQUESTS: "--requests",
    **{colour: f"--{name}" for name, colour in _PERCENTILES},
}
"""Colour of a drawing -> CSS variable, which a page defines for light and for dark."""
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "color": _INK, "fontweight": "bold", "pad": 10}
_PANEL_INCHES = (4.3, 3.5)
_SMALL_PANEL_INCHES = (3.7, 2.9)
"""Of the page, where four stand side by side on a screen and one on a phone."""
_DPI = 150


def write_png(report: LoadTestReport, path: Path) -> None:
    draw(report).savefig(path, format="png", dpi=_DPI)


def panels(results: Sequence[LevelResult]) -> list[tuple[str, str]]:
    """(heading, <svg> element) of each panel of one sweep. Its colours are the CSS variables of COLOURS."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text in the page's font, not drawn as curves
        return [(name, _svg(results, draw_panel)) for name, draw_panel in _PANELS]


def _svg(results: Sequence[LevelResult], draw_panel: DrawPanel) -> str:
    figure = _figure(_SMALL_PANEL_INCHES)
    axes = figure.subplots()
    draw_panel(axes, results)
    _style(axes, results)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    for colour, variable in COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    return text[text.index("<svg") :]


def draw(report: LoadTestReport) -> Figure:
    """All sweeps, one below the other."""
    rows = sweeps(report.levels)
    width, height = _PANEL_INCHES
    figure = _figure((len(_PANELS) * width, len(rows) * height + 0.5))
    figure.suptitle(title(report), fontsize=13, color=_INK, x=0.01, ha="left", fontweight="bold")
    grid = figure.subplots(len(rows), len(_PANELS), squeeze=False)
    for row, results in zip(grid, rows, strict=True):
        for axes, (name, draw_panel) in zip(row, _PANELS, strict=True):
            axes.set_title(name, **_TITLE)
            draw_panel(axes, results)
            _style(axes, results)
    return figure


def _figure(inches: tuple[float, float]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=inches, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02))
    FigureCanvasAgg(figure)
    return figure


def _draw_throughput(axes: Axes, results: Sequence[LevelResult]) -> None:
    loads = [result.value for result in results]
    tokens = [result.output_tokens_per_s for result in results]
    requests = [result.requests_per_s for result in results]
    lines = axes.plot(loads, tokens, color=_TOKENS, marker="o", label="output tokens/s")
    axes.set_ylabel("output tokens/s", color=_TOKENS)
    twin = axes.twinx()
    lines += twin.plot(loads, requests, color=_REQUESTS, marker="s", linestyle="--", label="requests/s")
    twin.set_ylabel("requests/s", color=_REQUESTS)
    twin.set_ylim(0, max(requests) * 1.2)
    twin.tick_params(colors=_MUTED, labelsize=9, length=0)
    for spine in twin.spines.values():
        spine.set_visible(False)
    _legend(axes, lines)


def _draw_latency(latency: str) -> DrawPanel:
    """`latency`: a field of LevelResult. A percentile that is not stated is left out of its line."""

    def draw_panel(axes: Axes, results: Sequence[LevelResult]) -> None:
        loads = [result.value for result in results]
        spreads: list[Percentiles] = [getattr(result, latency) for result in results]
        axes.set_ylabel("milliseconds", color=_MUTED)
        lines = []
        for label, colour in _PERCENTILES:
            values = [getattr(spread, label) for spread in spreads]
            if not all(map(math.isnan, values)):
                lines += axes.plot(loads, values, color=colour, marker="o", label=label)
        _legend(axes, lines)

    return draw_panel


_PANELS: tuple[tuple[str, DrawPanel], ...] = (
    ("throughput", _draw_throughput),
    ("time to first token", _draw_latency("time_to_first_token")),
    ("inter-token latency", _draw_latency("inter_token_latency")),
    ("end-to-end latency", _draw_latency("end_to_end_latency")),
)


def _legend(axes: Axes, lines: list[Line2D]) -> None:
    """Put the legend beside the title, at the right, where it covers no curve."""
    axes.legend(
        handles=lines,
        loc="lower right",
        bbox_to_anchor=(1.02, 0.985),
        ncols=len(lines),
        fontsize=8.5,
        frameon=False,
        labelcolor=_MUTED,
        columnspacing=1.0,
        handlelength=1.4,
    )


def _style(axes: Axes, results: Sequence[LevelResult]) -> None:
    from matplotlib.ticker import MaxNLocator

    loads, mode = [result.value for result in results], results[0].mode
    axes.set_xlabel({"concurrency": "concurrent requests", "request_rate": "requests/s asked for"}[mode.value])
    axes.xaxis.label.set_color(_MUTED)
    axes.margins(y=0.15, x=0.08)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    if len(loads) <= 10:
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8))
    for line in axes.get_lines():
        line.set(linewidth=1.8, markersize=4.5, clip_on=False)
