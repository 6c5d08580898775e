"""One row of the table: what was expected, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    name: str
    unit: str
    goal_of: str = ""
    """Of the goals' list, "E1" to "E13", "K1" to "K17"; empty = none."""
    predicted: float | None = None
    """By ci.bench.gpu.predictions; None = the model says nothing about it."""
    goal: float | None = None
    is_least: bool = False
    """The goal is the least that is wanted; otherwise the most."""
    is_exact: bool = False
    """The goal says what is right, on every device and at every size: to miss it is a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    expected: Expected
    measured: float
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None = there is none."""
        goal = self.expected.goal
        if goal is None:
            return None
        return self.measured >= goal if self.expected.is_least else self.measured <= goal

    @property
    def is_wrong(self) -> bool:
        return self.expected.is_exact and self.met is False

    def as_json(self) -> dict[str, Any]:
        """With numbers of four digits, which is more than is reproducible. What has its usual value is left out."""
        expected = self.expected
        values: dict[str, Any] = {"name": expected.name, "unit": expected.unit, "measured": rounded(self.measured)}
        others = {
            "predicted": rounded(expected.predicted),
            "goal": rounded(expected.goal),
            "met": self.met,
            "goal_of": expected.goal_of or None,
            "is_least": expected.is_least or None,
            "is_exact": expected.is_exact or None,
            "note": self.note or None,
        }
        return values | {name: value for name, value in others.items() if value is not None}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Figure:
        """The inverse of `as_json`, up to the digits."""
        of_figure = {"measured": values["measured"], "note": values.get("note", "")}
        expected = {name: value for name, value in values.items() if name not in ("measured", "note", "met")}
        return cls(expected=Expected(**expected), **of_figure)


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
