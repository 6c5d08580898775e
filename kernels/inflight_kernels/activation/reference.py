"""The gated activation in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.quantization.reference import quantize_per_token


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of the columns times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul_quantized(
    gate_up: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same quantised to `dtype`, with the scales of the rows."""
    return quantize_per_token(silu_and_mul(gate_up), dtype, scale)
