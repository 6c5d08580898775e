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

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import AttentionMetadata
from inflight.layers.lora import LoraSlots
from inflight.layers.weight import Weight
from inflight_kernels import Activation


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

    def gated(self, x_TI: Tensor, metadata: AttentionMetadata, activation: Activation) -> Tensor:
        """`activation` of the first half of its outputs times the second half: (T, O / 2)."""
        # Deterministic layers do the same in every step, whether one of its tokens has an adapter or none.
        may_adapt = self.deterministic or metadata.adapters_T is not None
        if self.lora is not None and self.lora.has_slots and may_adapt:
            return inflight_kernels.activate_and_mul(self(x_TI, metadata), activation)
        return self.weight.multiply_gated(x_TI, self.bias_O, activation, self.deterministic)


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
