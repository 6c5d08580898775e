"""Grafana's dashboard without Grafana: the panels' own expressions, asked of a Prometheus and drawn by matplotlib.

Panels of which no line moved are left out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ci.dashboard import INTERVAL, ROWS, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
PANEL_INCHES = (4.4, 2.3)
INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
UNITS = {"reqps": "requests/s", "percentunit": "%", "s": "s", "bytes": "MiB", "short": ""}
TIMES = {"percentunit": 100.0, "bytes": 1 / 2**20}
"""By what the values of a unit are multiplied."""

Series = tuple[str, Sequence[float], Sequence[float]]
"""Legend, seconds since the start, values."""


class Source(Protocol):
    """A Prometheus."""

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]: ...


def draw(source: Source, start: float, end: float, to: Path) -> None:
    """`start`, `end`: seconds of the clock, between which the server was scraped every second."""
    every = [(panel, list(series(source, panel, start, end))) for row in ROWS.values() for panel in row]
    panels = [(panel, lines) for panel, lines in every if any(is_moving(values) for *_, values in lines)]
    rows = -(-len(panels) // COLUMNS)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=(COLUMNS * PANEL_INCHES[0], rows * PANEL_INCHES[1]), layout=layout)
    FigureCanvasAgg(figure)
    for number, (panel, lines) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        _draw_panel(axes, panel, lines)
        axes.set_xlim(0, end - start)
    figure.savefig(to, dpi=110)


def series(source: Source, panel: Panel, start: float, end: float) -> Iterator[Series]:
    for legend, expression in panel.lines.items():
        asked = expression.replace(INTERVAL, "15s").replace("$job", "inflight").replace("$engine", "llm")
        for found in source.query_range(asked, start, end, 1.0):
            at = [float(second) - start for second, _ in found["values"]]
            values = [float(value) * TIMES.get(panel.unit, 1.0) for _, value in found["values"]]
            if any(map(math.isfinite, values)):
                yield _legend(legend, found["metric"]), at, values


def is_moving(values: Sequence[float]) -> bool:
    return len({value for value in values if math.isfinite(value)}) > 1


def _legend(text: str, labels: Mapping[str, str]) -> str:
    """As Grafana fills it in. Ports are drawn by chance: an instance is told by its host."""
    filled = re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), text)
    return re.sub(r"^(?:localhost|127\.0\.0\.1):\d+$", "localhost", filled)


def _draw_panel(axes: Axes, panel: Panel, lines: Sequence[Series]) -> None:
    unit = UNITS[panel.unit]
    axes.set_title(panel.title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
    axes.set_title(unit, loc="right", fontsize=8.5, color=MUTED)
    for legend, at, values in lines:
        axes.plot(at, values, linewidth=1.5, label=legend, clip_on=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3, fontsize=7.5, frameon=False, labelcolor=MUTED)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda second, _: f"{second:g} s"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
