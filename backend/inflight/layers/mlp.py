"""The feed-forward half of a layer: down(f(gate(x)) * up(x)), or, without a gate, down(f(up(x)))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight_kernels import Activation


@dataclass(slots=True)
class GatedMLP:
    gate_up: ColumnParallelLinear
    """The first half of the outputs is the gate, the second half is up."""
    down: RowParallelLinear
    activation: Activation = Activation.SILU
    gate_multiplier: float = 1.0
    """Of the gate."""

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        if self.gate_multiplier != 1.0:
            gate_TI, up_TI = self.gate_up(hidden_TD, metadata).chunk(2, -1)
            gate_TI = inflight_kernels.activate(gate_TI * self.gate_multiplier, self.activation)
            return self.down(gate_TI * up_TI, metadata)
        return self.down(self.gate_up.gated(hidden_TD, metadata, self.activation), metadata)


@dataclass(slots=True)
class MLP:
    up: ColumnParallelLinear
    down: RowParallelLinear
    activation: Activation
    """One that needs no gate."""

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.down(inflight_kernels.activate(self.up(hidden_TD, metadata), self.activation), metadata)
