"""Matrix products and their tensor-parallel forms. Knows no architecture; is handed its rank's weights.

Legend: T tokens, I input features, O output features of this rank.
A layer split by columns holds some output features and gives them; a layer split by rows holds some input features and
its outputs are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup


@dataclass(slots=True)
class ColumnParallelLinear:
    """This rank's output features. Several layers with one input (q, k, v; gate, up) are stacked into one of these."""

    weight_OI: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(slots=True)
class RowParallelLinear:
    """Sum over the ranks of what each makes of its input features."""

    weight_OI: Tensor
    bias_O: Tensor | None
    """On the leader only, so that the sum has it once."""
    group: TensorParallelGroup

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.group.all_reduce(F.linear(x_TI, self.weight_OI, self.bias_O))
