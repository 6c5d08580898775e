"""One row made of those of all tokens of a prompt. numpy, no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.output_config import Pooling
from inflight.scheduler_output import Array


class PooledRows:
    """Rows come in pieces, in their order. They are added one after the other, so that no bit depends on where a piece
    ends."""

    __slots__ = ("_first", "_num_rows", "_of_all", "_pooling", "_weight")

    def __init__(self, pooling: Pooling, first: int = 0) -> None:
        """`first`: number of the first row that counts."""
        self._pooling = pooling
        self._first = first
        self._of_all: npt.NDArray[Any] | None = None
        """Of the rows so far: their sum, one of them, or the largest of each feature."""
        self._num_rows = 0
        self._weight = 0.0

    def add(self, rows: Array) -> None:
        """`rows`: (rows, features), at least one."""
        num_skipped = min(max(self._first - self._num_rows, 0), len(rows))
        self._num_rows += num_skipped
        rows = rows[num_skipped:]
        if not len(rows):
            return
        match self._pooling:
            case "cls":
                self._of_all = rows[0].copy() if self._of_all is None else self._of_all
            case "last":
                self._of_all = rows[-1].copy()
            case "max":
                largest = rows.max(axis=0)
                self._of_all = largest if self._of_all is None else np.maximum(self._of_all, largest)
            case _:
                self._add_up(rows)
        self._num_rows += len(rows)

    def _add_up(self, rows: Array) -> None:
        weights = np.ones(len(rows))
        if self._pooling == "weighted_mean":
            weights = np.arange(self._num_rows + 1, self._num_rows + len(rows) + 1, dtype=np.float64)
        weighted = rows * weights[:, None]
        if self._of_all is not None:
            weighted[0] += self._of_all
        # The sum of a reduction may be one of partial sums.
        self._of_all = np.add.accumulate(weighted, axis=0)[-1].copy()
        self._weight += float(weights.sum())

    def pooled(self) -> Array:
        """(1, features), float32, of at least one row."""
        assert self._of_all is not None, "a prompt has a token"
        return (self._of_all / (self._weight or 1.0)).astype(np.float32)[None]
