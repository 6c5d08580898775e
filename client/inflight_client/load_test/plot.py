"""Plots of a report: throughput and three latencies over load, one row of panels per sweep. PNG, or SVG for the
page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight_client.load_test.profile import LevelResult, Percentiles
from inflight_client.load_test.report import sweeps, title
from inflight_client.load_test.runner import LoadTestReport
from inflight_client.load_test.sweep import LoadMode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_INK, _MUTED, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_TOKENS, _REQUESTS = "#2563a6", "#d97706"
# One hue, darker for higher percentiles: the three lines of a panel show one quantity.
_PERCENTILES = (("p50", "#7fb3dd"), ("p90", "#3b7fbf"), ("p99", "#123d6b"))
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "color": _INK, "fontweight": "bold", "pad": 10}
_PANEL_INCHES = (4.3, 3.5)
_DPI = 150

_LATENCIES: tuple[tuple[str, Callable[[LevelResult], Percentiles]], ...] = (
    ("time to first token", lambda result: result.time_to_first_token),
    ("inter-token latency", lambda result: result.inter_token_latency),
    ("end-to-end latency", lambda result: result.end_to_end_latency),
)


def write_png(report: LoadTestReport, path: Path) -> None:
    draw(report).savefig(path, format="png", dpi=_DPI)


def svg(report: LoadTestReport) -> str:
    """The same picture as an <svg> element."""
    buffer = io.StringIO()
    draw(report, heading=False).savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw(report: LoadTestReport, *, heading: bool = True) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = sweeps(report.levels)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(4 * width, len(rows) * height + (0.5 if heading else 0.0)), layout=layout)
    FigureCanvasAgg(figure)
    if heading:
        figure.suptitle(title(report), fontsize=13, color=_INK, x=0.01, ha="left", fontweight="bold")
    panels = figure.subplots(len(rows), 4, squeeze=False)
    for axes, results in zip(panels, rows, strict=True):
        loads = [result.value for result in results]
        _draw_throughput(axes[0], loads, results)
        for panel, (name, latency) in zip(axes[1:], _LATENCIES, strict=True):
            _draw_latency(panel, loads, name, [latency(result) for result in results])
        for panel in axes:
            _style(panel, loads, results[0].mode)
    return figure


def _draw_throughput(axes: Axes, loads: list[float], results: Sequence[LevelResult]) -> None:
    axes.set_title("throughput", **_TITLE)
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


def _draw_latency(axes: Axes, loads: list[float], name: str, values: list[Percentiles]) -> None:
    axes.set_title(name, **_TITLE)
    axes.set_ylabel("milliseconds", color=_MUTED)
    lines = []
    for label, colour in _PERCENTILES:
        lines += axes.plot(loads, [getattr(value, label) for value in values], color=colour, marker="o", label=label)
    _legend(axes, lines)


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


def _style(axes: Axes, loads: list[float], mode: LoadMode) -> None:
    from matplotlib.ticker import MaxNLocator

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
