"""The gated activation between the two halves of a feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.dispatch import implementation


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` (T, 2I), float, gate in the first half; returns (T, I)."""
    result: Tensor = implementation(gate_up, __name__).silu_and_mul(gate_up)
    return result


def silu_and_mul_quantized(
    gate_up: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same, quantised in the same launch: returns q (T, I) of `dtype` and scales (T,), float32.

    The result is bitwise equal to `quantize_per_token(silu_and_mul(gate_up), dtype, scale)`.
    """
    result: tuple[Tensor, Tensor] = implementation(gate_up, __name__).silu_and_mul_quantized(gate_up, dtype, scale)
    return result
