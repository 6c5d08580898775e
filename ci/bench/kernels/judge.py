"""Decides whether a result is correct and whether a goal is met. Knows no device and measures no time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ci.bench.kernels.case import Goal


@dataclass(frozen=True)
class Figures:
    """Measurements of one row: fraction of the roofline, microseconds a call, 1e12 operations a second, ratios to
    peers."""

    fraction: float
    microseconds: float
    tflops: float
    # By peer: its time / ours. With "best", if any peer that counts was timed.
    ratios: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """`met` is None if no part of the goal could be judged; `missed` and `unjudged` name parts of the goal."""

    met: bool | None
    missed: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.missed:
            return "no: " + ", ".join(self.missed)
        if self.met is None:
            return "not judged: " + ", ".join(self.unjudged)
        return "yes" + (f", without {', '.join(self.unjudged)}" if self.unjudged else "")


def difference(result: Any, expected: Any, tolerance: float) -> float:
    """The largest difference as a multiple of the allowed one, which is `tolerance`, both absolute and relative."""
    results, expecteds = (x if isinstance(x, tuple | list) else (x,) for x in (result, expected))
    if len(results) != len(expecteds):
        return math.inf
    return max(_difference(a, b, tolerance) for a, b in zip(results, expecteds, strict=True))


def _difference(result: Tensor, expected: Tensor, tolerance: float) -> float:
    if result.shape != expected.shape:
        return math.inf
    if not result.numel():
        return 0.0
    a, b = result.float(), expected.to(result.device).float()
    worst = ((a - b).abs() / (tolerance * (1 + b.abs()))).nan_to_num(nan=math.inf).max()
    # Equal infinities are equal.
    return 0.0 if bool(torch.equal(a, b)) else float(worst)


def judge(goal: Goal, figures: Figures) -> Verdict:
    """Compare a row's measurements with its goal."""
    missed: list[str] = []
    unjudged: list[str] = []
    judged = 0
    checks = [
        (goal.fraction, figures.fraction, "of the roofline"),
        (goal.tflops, figures.tflops, "TFLOP/s"),
        *((least, figures.ratios.get(peer), f"x {peer}") for peer, least in goal.ratios.items()),
    ]
    for least, value, name in checks:
        if least is None:
            continue
        if value is None:
            unjudged.append(name)
            continue
        judged += 1
        if value < least:
            missed.append(f"{value:.3g} {name}, {least:g} wanted")
    if goal.microseconds is not None:
        judged += 1
        if figures.microseconds > goal.microseconds:
            missed.append(f"{figures.microseconds:.3g} us, {goal.microseconds:g} wanted")
    met = None if not judged else not missed
    return Verdict(met, tuple(missed), tuple(unjudged))


def mean_figures(rows: list[Figures]) -> Figures:
    """Geometric means of a group's rows, with the ratios to those peers that were timed in every row."""
    common = set.intersection(*(set(row.ratios) for row in rows))
    return Figures(
        geometric_mean([row.fraction for row in rows]),
        geometric_mean([row.microseconds for row in rows]),
        geometric_mean([row.tflops for row in rows]),
        {peer: geometric_mean([row.ratios[peer] for row in rows]) for peer in sorted(common)},
    )


def geometric_mean(values: list[float]) -> float:
    """The geometric mean of values that are not negative."""
    if min(values) <= 0.0:
        return 0.0
    return math.exp(sum(map(math.log, values)) / len(values))
