"""Matrix products, split over the ranks of a tensor-parallel group. Knows no architecture; gets its rank's weights.

Legend: T tokens, I input features, O output features of this rank.
A column-parallel layer computes some of the output features. A row-parallel layer uses some of the input features, and
its outputs are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup


@dataclass(slots=True)
class ColumnParallelLinear:
    """This rank's output features. Several layers with the same input (q, k, v; gate, up) are stacked into one."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return inflight_kernels.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(slots=True)
class RowParallelLinear:
    """The sum over all ranks of each rank's product with its input features."""

    weight_OI: Tensor
    bias_O: Tensor | None
    """On the leader only, so that the sum contains it once."""
    group: TensorParallelGroup

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.group.all_reduce(inflight_kernels.linear(x_TI, self.weight_OI, self.bias_O))
