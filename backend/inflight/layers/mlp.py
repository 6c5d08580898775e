"""The gated feed-forward half of a layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear


@dataclass(slots=True)
class GatedMLP:
    gate_up: ColumnParallelLinear
    """The first half of the outputs is the gate, the second half is up."""
    down: RowParallelLinear

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.down(inflight_kernels.silu_and_mul(self.gate_up(hidden_TD, metadata)), metadata)
