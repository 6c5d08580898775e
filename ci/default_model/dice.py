"""Skewed random choice: the only source of chance in the generated text.

Knows nothing of stories. Choices follow a power law rather than a uniform one, so that a model trained on the text has
a clear favourite at every fork: greedy decoding then never stands on a near tie, and rounding cannot change its tokens.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A seeded chooser. The same seed gives the same choices on every platform and Python version."""

    def __init__(self, seed: int, skew: float = 1.6) -> None:
        self._random = random.Random(seed)
        self._skew = skew
        self._weights: dict[tuple[int, float], list[float]] = {}

    def pick(self, items: Sequence[T], key: str = "", skew: float | None = None) -> T:
        """One item; the r-th of the order has weight r ** -skew.

        `key` turns the order by an amount that depends on it alone, so each key has its own favourite (the fox's home
        is not the duck's) while every item stays possible.
        """
        exponent = self._skew if skew is None else skew
        weights = self._cumulative_weights(len(items), exponent)
        turn = zlib.crc32(key.encode()) if key else 0
        rank = self._random.choices(range(len(items)), cum_weights=weights)[0]
        return items[(rank + turn) % len(items)]

    def pick_other(self, items: Sequence[T], taken: Sequence[T], key: str = "", skew: float | None = None) -> T:
        """One item that is not in `taken`."""
        return self.pick([item for item in items if item not in taken], key, skew)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def number(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included, each as likely as the other."""
        return self._random.randint(low, high)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._random.sample(list(items), len(items))

    def _cumulative_weights(self, count: int, skew: float) -> list[float]:
        if (count, skew) not in self._weights:
            self._weights[count, skew] = list(accumulate(rank**-skew for rank in range(1, count + 1)))
        return self._weights[count, skew]
