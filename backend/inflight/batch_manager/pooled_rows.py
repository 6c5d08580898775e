"""One row made of those of all tokens of a prompt. numpy, no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inflight.output_config import Pooling
from inflight.scheduler_output import Array


class PooledRows:
    """Rows come in pieces, in their order. They are added one after the other, so that no bit depends on where a piece
    ends."""

    __slots__ = ("_num_rows", "_pooling", "_sum", "_weight")

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: npt.NDArray[np.float64] | None = None
        self._num_rows = 0
        self._weight = 0.0

    def add(self, rows: Array) -> None:
        """`rows`: (rows, features), at least one."""
        weights = np.ones(len(rows))
        if self._pooling == "weighted_mean":
            weights = np.arange(self._num_rows + 1, self._num_rows + len(rows) + 1, dtype=np.float64)
        weighted = rows * weights[:, None]
        if self._sum is not None:
            weighted[0] += self._sum
        # The sum of a reduction may be one of partial sums.
        self._sum = np.add.accumulate(weighted, axis=0)[-1].copy()
        self._num_rows += len(rows)
        self._weight += float(weights.sum())

    def pooled(self) -> Array:
        """(1, features), float32, of at least one row."""
        assert self._sum is not None, "a prompt has a token"
        return (self._sum / self._weight).astype(np.float32)[None]
