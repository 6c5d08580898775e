"""The plot of an analysis: throughput against latency, a line for each variant over its concurrencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inflight_client.analyze.results import Analysis, Measurement
from inflight_client.analyze.variants import differing

_INK, _MUTED, _GRID, _REST = "#1f2933", "#616e7c", "#e4e7eb", "#c3cad2"
_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#b91c1c")
"""Of the best variants; the others are grey."""


def write_png(analysis: Analysis, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines = _lines(analysis)
    told = differing(analysis.options.variants)
    for number, (config, points) in reversed(list(enumerate(lines.items()))):
        best = number < len(_COLOURS)
        axes.plot(
            [analysis.tokens_per_s(point) for point in points],
            [point.latency_p99 for point in points],
            color=_COLOURS[number] if best else _REST,
            marker="o",
            linewidth=1.8 if best else 1.0,
            markersize=4.5,
            zorder=len(lines) - number,
            label=": ".join(filter(None, (config, ", ".join(points[0].variant[name] for name in told))))
            if best
            else None,
        )
    for point in next(iter(lines.values())):
        axes.annotate(
            str(point.concurrency),
            (analysis.tokens_per_s(point), point.latency_p99),
            textcoords="offset points",
            xytext=(6, -10),
            fontsize=8.5,
            color=_MUTED,
        )
    axes.set_title(
        f"{analysis.target.model}: throughput and latency by configuration", loc="left", color=_INK, fontweight="bold"
    )
    axes.set_xlabel("output tokens/s (numbers: concurrent requests)", color=_MUTED)
    axes.set_ylabel("p99 of a request, ms", color=_MUTED)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(_GRID)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], title=", ".join(told), fontsize=8.5, title_fontsize=8.5, frameon=False, loc="best"
    )
    figure.savefig(path, dpi=150)


def _lines(analysis: Analysis) -> dict[str, Sequence[Measurement]]:
    """The measurements of each variant by concurrency; the variant with the highest throughput first."""
    lines: dict[str, list[Measurement]] = {}
    for each in analysis.measurements:
        lines.setdefault(each.config, []).append(each)
    return {config: sorted(points, key=lambda point: point.concurrency) for config, points in lines.items()}
