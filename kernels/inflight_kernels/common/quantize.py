"""Symmetric quantisation of rows inside a kernel, shared by every operation that ends with it.

    absmax = max |y|      scale = absmax / QMAX      q = round(clamp(y * (1 / scale), -QMAX, QMAX))

One float32 scale per row; q * scale equals y within half a quantisation step. A row whose absmax is below `SMALLEST` is
treated as zero: its scale is 1. Where one scale is given for all rows, it stands for that of each: absmax is not looked
for, and what lies beyond QMAX * scale becomes QMAX. Both divisions are rounded as IEEE 754 specifies, so that the torch
reference gives the same bits. Rounding is to nearest, ties to even. A maximum does not depend on the order of its
operands, so the launch configuration cannot change q or scale. A NaN stays NaN in float8_e4m3fn; int8 has no NaN, and q
is unspecified there.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from inflight_kernels.common.checks import compute_capability

# Largest magnitude of each quantised type. int8 does not use -128, to be symmetric.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# 1 / scale must not overflow float32: QMAX / 2^-100 < 2^109.
SMALLEST: tl.constexpr = tl.constexpr(2.0**-100)
# 1.5 * 2^23: neighbouring float32 numbers of this magnitude differ by 1, so that adding and subtracting it rounds to
# whole numbers, ties to even. (triton's own round needs libdevice, which the interpreter lacks.)
_WHOLE: tl.constexpr = tl.constexpr(12582912.0)
# The oldest architecture that converts to float8_e4m3fn.
_FP8_CAPABILITY = 89


@triton.jit
def row_scale(absmax, QMAX: tl.constexpr):
    """Scale of rows whose largest magnitudes are `absmax`, float32."""
    return tl.where(absmax < SMALLEST, 1.0, tl.div_rn(absmax, tl.full(absmax.shape, QMAX, tl.float32)))


@triton.jit
def inverse_of(scale):
    """What values are multiplied by before rounding."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def quantized(y, inverse_scale, dtype: tl.constexpr, QMAX: tl.constexpr):
    """float32 `y` times `inverse_scale`, which must broadcast to it, in `dtype`."""
    scaled = tl.clamp(y * inverse_scale, -QMAX, QMAX, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        scaled = (scaled + _WHOLE) - _WHOLE
    return scaled.to(dtype)


def check_quantized_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `dtype` can be quantised to on `device`."""
    if dtype not in LARGEST:
        raise ValueError(f"dtype must be torch.float8_e4m3fn or torch.int8, got {dtype}")
    check_fp8_device(dtype, device)


def check_scale(scale: float | None) -> None:
    """Raise ValueError unless the scale that is given for all rows, if one is, is a positive number."""
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}")


def check_group_size(group_size: int, scale: float | None) -> None:
    """Raise ValueError unless `group_size` is a power of two, or 0, which it is where a scale is given for all rows."""
    if group_size < 0 or group_size & (group_size - 1):
        raise ValueError(f"group_size must be a power of two, or 0, got {group_size}")
    if group_size and scale is not None:
        raise ValueError("groups have scales of their own: scale must be None where there is a group_size")


def check_fp8_device(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if `dtype` is float8_e4m3fn and `device` cannot convert to it."""
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and compute_capability(device) < _FP8_CAPABILITY:
        raise ValueError(f"{device} cannot convert to torch.float8_e4m3fn: it takes compute capability 8.9")
