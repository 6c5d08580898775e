"""Norms of columns that several ranks have together: what the ranks tell each other of them.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight_kernels import PartSquares


@dataclass(frozen=True, slots=True)
class NormPart:
    """Of one norm."""

    ranks: range
    """Which have its columns, each some of them: numbers within the group."""
    num_columns: int
    """Of all of these together."""


@dataclass(frozen=True, slots=True)
class NormParts:
    """Of the norms whose squares ranks exchange at once."""

    group: TensorParallelGroup
    of_norms: tuple[NormPart, ...]

    def squares(self, inputs: Sequence[Tensor], gate: Tensor | None = None) -> list[PartSquares]:
        """Of what each norm is of, this rank's columns of it (T, any number), times silu(gate). Added up in the order
        of ranks by whoever has them: the same on all."""
        sums_TP = self.group.all_gather(inflight_kernels.row_squares(inputs, gate))
        count = len(self.of_norms)
        return [
            PartSquares(sums_TP, range(ranks.start * count + i, ranks.stop * count + i, ranks.step * count), columns)
            for i, (ranks, columns) in enumerate((each.ranks, each.num_columns) for each in self.of_norms)
        ]
