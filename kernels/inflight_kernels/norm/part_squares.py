"""What a norm needs of the columns that `x` does not have, because other ranks have them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PartSquares:
    """A row's sum of squares, as the sums of all parts of its columns."""

    sums_TP: Tensor
    """float32, contiguous: see `row_squares`."""
    parts: range
    """The columns of `sums_TP` that are added up, in this order."""
    num_columns: int
    """Of all parts together."""
