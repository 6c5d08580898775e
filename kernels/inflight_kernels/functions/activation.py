"""The gated activation between the two halves of a feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.dispatch import implementation


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` (T, 2I), float, gate in the first half; returns (T, I)."""
    result: Tensor = implementation(gate_up).silu_and_mul(gate_up)
    return result
