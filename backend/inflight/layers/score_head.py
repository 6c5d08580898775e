"""The head of a network that scores texts: a few numbers made of one hidden state of each.

Legend: B texts, D hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from inflight.layers.weight import Weight


@dataclass(slots=True, kw_only=True)
class Dense:
    """A product whose weights every rank has whole."""

    weight: Weight
    bias_O: Tensor | None
    deterministic: bool

    def __call__(self, x_BI: Tensor) -> Tensor:
        return self.weight.multiply(x_BI, self.bias_O, self.deterministic)


@dataclass(slots=True, kw_only=True)
class ScoreHead:
    steps: tuple[Callable[[Tensor], Tensor], ...]
    """One after the other; the last gives a number for each label."""

    def __call__(self, hidden_BD: Tensor) -> Tensor:
        """(B, D) to (B, L): logits."""
        for step in self.steps:
            hidden_BD = step(hidden_BD)
        return hidden_BD
