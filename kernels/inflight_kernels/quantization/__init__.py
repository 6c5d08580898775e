"""Quantisation of activations, with one scale per row or group of its columns, or a given one."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.dispatch import implementation

FP8_CAPABILITY = (8, 9)
"""Least compute capability (Ada) of a GPU that converts to float8_e4m3fn and multiplies it."""


def quantize_per_token(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: float | None = None, group_size: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantise the rows of `x` (..., K), float: returns q (..., K) of `dtype` and their scales (...), float32, with
    x approximately q * scale.

    `dtype` is torch.float8_e4m3fn (largest magnitude 448; on a GPU from FP8_CAPABILITY on) or torch.int8
    (symmetric, 127). A row's scale is its largest magnitude divided by that of the dtype, 1 for a row of zeros. With
    `scale`, a positive number, it is that of every row instead, and elements beyond its range become the largest
    magnitude. Rounding is to nearest, ties to even. A row's result does not depend on the other rows.

    With `group_size`, a power of two, and without `scale`, each group of so many columns, of which the last one may
    have fewer, is quantised as a row of its own: the scales are (..., K / group_size), rounded up.
    """
    function = implementation(x, __name__).quantize_per_token
    result: tuple[Tensor, Tensor] = function(x, dtype, scale, group_size)
    return result
