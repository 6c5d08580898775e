"""A plot of one steady second of decode: what the host launches, and which kernels the GPU runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci.bench.gpu.figure import Figure
from ci.bench.gpu.part import Given
from ci.bench.gpu.timed_runner import TimedStep
from ci.bench.gpu.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACE, STEPS, PLOT = "kernels.json", "steps.json", "timeline.png"
COLOURS = ("#2563a6", "#d97706", "#3f8f5b", "#8e5aa8", "#b3463c", "#616e7c")
OTHERS = "others"
MOST_NAMED = len(COLOURS) - 1
"""Kernels with a colour of their own, those that take longest."""
BINS = 400
"""Of the whole time."""
NEAR_STEPS = 4
"""Of which the host's part is drawn; of the first one the kernels, too."""


def write_timeline(folder: Path, trace: Trace, steps: Sequence[TimedStep]) -> None:
    """Keep what is drawn."""
    trace.write(folder / TRACE)
    spans = [(step.began, step.launched, step.done) for step in steps]
    Path(folder, STEPS).write_text(json.dumps(spans), encoding="utf-8")


def draw(given: Given) -> Iterator[Figure]:
    """Needs what a part of decode has kept."""
    kernels = Trace.read(given.folder / TRACE).kernels
    steps = json.loads(Path(given.folder, STEPS).read_text(encoding="utf-8"))
    length_ms = _draw(kernels, steps, given.folder / PLOT)
    yield given.figure("length of the timeline plot", length_ms, f"in {PLOT}")


def _draw(kernels: list[Span], steps: list[list[float]], path: Path) -> float:
    """Milliseconds of the whole. The clocks of host and GPU differ, so each has its own beginning."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(14, 8), layout="constrained")
    FigureCanvasAgg(plot)
    whole, near, host = plot.subplots(3, 1, height_ratios=(3, 2, 2))
    for axes in (whole, near, host):
        axes.margins(x=0)
    names = _longest(kernels)
    length_ms = _shares(whole, kernels, names)
    _kernels(near, kernels, names, len(kernels) // len(steps))
    _steps(host, steps)
    plot.savefig(path, dpi=120)
    return max(length_ms, 1e3 * (steps[-1][2] - steps[0][0]))


def _longest(kernels: list[Span]) -> dict[str, str]:
    """Name -> colour."""
    times: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel.name] += round(kernel.length)
    names = [name for name, _ in times.most_common(MOST_NAMED)]
    return dict(zip([*names, OTHERS], COLOURS, strict=False))


def _shares(axes: Axes, kernels: list[Span], colours: dict[str, str]) -> float:
    """Share of each short while in which each kernel runs; milliseconds of all."""
    axes.set(title="GPU: share of the time by kernel", xlabel="ms", ylim=(0, 1))
    if not kernels:
        axes.set_title("GPU: the profiler has seen no kernel")
        return 0.0
    start, end = kernels[0].start, max(kernel.end for kernel in kernels)
    bin_us = (end - start) / BINS
    shares: dict[str, list[float]] = {name: [0.0] * BINS for name in colours}
    for kernel in kernels:
        place = min(int((kernel.start - start) / bin_us), BINS - 1)
        shares[kernel.name if kernel.name in colours else OTHERS][place] += kernel.length / bin_us
    times = [place * bin_us / 1e3 for place in range(BINS)]
    labels = [name[:60] for name in colours]
    axes.stackplot(times, *shares.values(), labels=labels, colors=list(colours.values()), step="post")
    axes.legend(loc="lower left", fontsize=7)
    return (end - start) / 1e3


def _kernels(axes: Axes, kernels: list[Span], colours: dict[str, str], count: int) -> None:
    axes.set(title="GPU: the first kernels, as many as a step has", xlabel="ms", yticks=[])
    by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in colours}
    for kernel in kernels[:count]:
        start = (kernel.start - kernels[0].start) / 1e3
        by_name[kernel.name if kernel.name in colours else OTHERS].append((start, kernel.length / 1e3))
    for name, spans in by_name.items():
        axes.broken_barh(spans, (0, 1), color=colours[name], linewidth=0)


def _steps(axes: Axes, steps: list[list[Any]]) -> None:
    """The launch of a step, and the wait for its tokens."""
    axes.set(title="host: launch of a step (blue), and until its tokens are there (grey)", xlabel="ms", yticks=[])
    near = steps[:NEAR_STEPS]
    for place, (began, launched, done) in enumerate(near):
        times = [1e3 * (at - near[0][0]) for at in (began, launched, done)]
        axes.broken_barh([(times[0], times[1] - times[0])], (place, 0.8), color=COLOURS[0])
        axes.broken_barh([(times[1], times[2] - times[1])], (place, 0.8), color=COLOURS[-1], alpha=0.4)
