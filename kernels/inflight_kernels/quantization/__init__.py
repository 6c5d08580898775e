"""Quantisation of activations, a scale a row."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.dispatch import implementation


def quantize_per_token(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Rows of `x` (..., K), float, as q (..., K) of `dtype`, and scale (...), float32, so that x is about q * scale.

    `dtype` is torch.float8_e4m3fn (largest magnitude 448; on a GPU from compute capability 8.9 on) or torch.int8
    (symmetric, 127). scale is the row's largest magnitude over that of the dtype, 1 for a row of zeros; rounding is to
    nearest, ties to even. A row's result does not depend on the other rows.
    """
    result: tuple[Tensor, Tensor] = implementation(x, __name__).quantize_per_token(x, dtype)
    return result
