"""Matrix products, split over the ranks of a tensor-parallel group. Knows no architecture; gets its rank's weights.

Legend: T tokens, I input features, O output features of this rank.
A column-parallel layer computes some of the output features. A row-parallel layer uses some of the input features, and
its outputs are summed over the ranks. The weight's format decides which operation multiplies (weight.py). The products
of low-rank adapters are added to those of a rank, before any sum over the ranks. Deterministic: the bits of a token's
features depend on that token alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import AttentionMetadata
from inflight.layers.lora import LoraSlots
from inflight.layers.weight import Weight


@dataclass(slots=True)
class ColumnParallelLinear:
    """This rank's output features. Several layers with the same input (q, k, v; gate, up) are stacked into one."""

    weight: Weight
    bias_O: Tensor | None
    lora: LoraSlots | None = None
    deterministic: bool = False

    def __call__(self, x_TI: Tensor, metadata: AttentionMetadata) -> Tensor:
        y_TO = self.weight.multiply(x_TI, self.bias_O, self.deterministic)
        return y_TO if self.lora is None else self.lora.add(y_TO, x_TI, metadata)


@dataclass(slots=True)
class RowParallelLinear:
    """The sum over all ranks of each rank's product with its input features."""

    weight: Weight
    bias_O: Tensor | None
    """On the leader only, so that the sum contains it once."""
    group: TensorParallelGroup
    lora: LoraSlots | None = None
    deterministic: bool = False

    def __call__(self, x_TI: Tensor, metadata: AttentionMetadata) -> Tensor:
        y_TO = self.weight.multiply(x_TI, self.bias_O, self.deterministic)
        if self.lora is not None:
            y_TO = self.lora.add(y_TO, x_TI, metadata)
        return self.group.all_reduce(y_TO)
