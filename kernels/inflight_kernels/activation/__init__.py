"""The activation between the two halves of a feed-forward layer, with a gate or without one; a gate and a soft cap for
what a part of a network computes."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.dispatch import implementation


def activate_and_mul(gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """f(gate) * up of `gate_up` (T, 2I), float, gate in the first half; returns (T, I)."""
    result: Tensor = implementation(gate_up, __name__).activate_and_mul(gate_up, activation)
    return result


def activate_and_mul_quantized(
    gate_up: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
    activation: Activation = Activation.SILU,
) -> tuple[Tensor, Tensor]:
    """The same, quantised in the same launch: returns q (T, I) of `dtype` and scales (T,) or (T, G), float32.

    The result is bitwise equal to `quantize_per_token(activate_and_mul(gate_up, activation), dtype, scale,
    group_size)`.
    """
    function = implementation(gate_up, __name__).activate_and_mul_quantized
    result: tuple[Tensor, Tensor] = function(gate_up, dtype, scale, group_size, activation)
    return result


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of `x` (T, I), float, rounded once: within +-cap, and nearly x where that is small."""
    result: Tensor = implementation(x, __name__).soft_cap(x, cap)
    return result


def activate(x: Tensor, activation: Activation) -> Tensor:
    """f(x) of `x` (T, I), float; returns (T, I). Raises ValueError for an activation that only gated layers have."""
    if activation is Activation.CLAMPED_SWIGLU:
        raise ValueError(f"{activation.value} is for gated layers only")
    result: Tensor = implementation(x, __name__).activate(x, activation)
    return result


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), rounded once; `x` (T, I), float, and `gate`, of its dtype, (T, I) or (T, 1): of each row."""
    result: Tensor = implementation(x, __name__).sigmoid_mul(x, gate)
    return result
