"""Activations in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.quantization.reference import quantize_per_token


def sigmoid(x: Tensor) -> Tensor:
    """Not torch's, which on CPUs gives an element other bits where it is among a tensor's last ones, which fill no
    vector: they would depend on the rows beside it."""
    return 1.0 / (1.0 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    """Not torch's, which on CPUs gives other bits for a view of a wider tensor, and so for one row and for several."""
    wide = x.float()
    return (wide * 0.5 * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    """Likewise; (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    wide = x.float()
    return (wide * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
}
"""Those that need no gate."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    """f(x)."""
    return FUNCTIONS[activation](x)


def activate_and_mul(gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """f of the first half of the columns times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.CLAMPED_SWIGLU:
        gate, up = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
        return (gate * sigmoid(1.702 * gate) * (up + 1.0)).to(gate_up.dtype)
    return activate(gate, activation) * up


def activate_and_mul_quantized(
    gate_up: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: float | None = None,
    group_size: int = 0,
    activation: Activation = Activation.SILU,
) -> tuple[Tensor, Tensor]:
    """The same quantised to `dtype`, with the scales of the rows or groups."""
    return quantize_per_token(activate_and_mul(gate_up, activation), dtype, scale, group_size)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """In float32, rounded once."""
    return (x.float() * sigmoid(gate.float())).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Likewise."""
    return (cap * (x.float() / cap).tanh_()).to(x.dtype)
