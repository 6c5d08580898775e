"""Code shared by what rotates heads and writes to the cache: norm, rotation and quantisation of a tile of heads."""

from __future__ import annotations

import triton
import triton.language as tl

from inflight_kernels.common.quantize import inverse_of, quantized, row_scale


@triton.jit
def store(ptrs, y, inverse_scale, QMAX: tl.constexpr, mask):
    """Store `y`, if there is a scale quantised to the dtype of the cache."""
    if inverse_scale is not None:
        y = quantized(y.to(tl.float32), inverse_scale, ptrs.dtype.element_ty, QMAX)
    tl.store(ptrs, y, mask=mask)


@triton.jit
def largest_of_heads(y):
    """The largest magnitude of each head; NaN where an element is not finite, which a maximum might pass over."""
    y = y.to(tl.float32)
    return tl.max(tl.abs(y), axis=1) + tl.sum(y * 0.0, axis=1)


@triton.jit
def new_scales(ptrs, absmax, mask_heads, QMAX: tl.constexpr):
    """Store the scales of heads with these largest magnitudes. Returns their inverses, (BLOCK_HEADS, 1)."""
    scales = row_scale(absmax, QMAX)
    tl.store(ptrs, scales, mask=mask_heads)
    return inverse_of(scales)[:, None]


@triton.jit
def normalised(x, inverse_rms, dtype: tl.constexpr, ROUNDS: tl.constexpr):
    """x times `inverse_rms`, float32, rounded to `dtype` or not."""
    y = x * inverse_rms
    if ROUNDS:
        y = y.to(dtype).to(tl.float32)
    return y


@triton.jit
def rotate_heads(
    in_ptrs, out_ptrs, mask_heads, position, cos_sin_ptr, stride_table, weight_ptr, eps, inverse_scale, scales_ptrs,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, QMAX: tl.constexpr,
    ADJACENT_PAIRS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one tile of heads; `in_ptrs`, `out_ptrs` (BLOCK_HEADS, 1) point to heads' first elements.
    Where there are `scales_ptrs` (BLOCK_HEADS,), each head's scale is found and stored there."""
    dtype = in_ptrs.dtype.element_ty
    offs_half = tl.arange(0, BLOCK_HALF)
    mask_half = offs_half < HALF
    offs1 = offs_half
    offs2 = HALF + offs_half
    if ADJACENT_PAIRS:
        offs1 = 2 * offs_half
        offs2 = 2 * offs_half + 1
    mask = mask_heads[:, None] & mask_half[None, :]
    x1 = tl.load(in_ptrs + offs1[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(in_ptrs + offs2[None, :], mask=mask, other=0.0).to(tl.float32)
    # Loaded after x, because the address of the row depends on the position, which is still being loaded.
    table_ptrs = cos_sin_ptr + position * stride_table + offs_half
    cos = tl.load(table_ptrs, mask=mask_half, other=0.0)
    sin = tl.load(table_ptrs + HALF, mask=mask_half, other=0.0)
    if BLOCK_REST > 0:
        offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask_rest_1d = offs_rest < HEAD_DIM
        mask_rest = mask_heads[:, None] & mask_rest_1d[None, :]
        x3 = tl.load(in_ptrs + offs_rest[None, :], mask=mask_rest, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(x3 * x3, axis=1)
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        w1 = tl.load(weight_ptr + offs1, mask=mask_half, other=0.0).to(tl.float32)
        w2 = tl.load(weight_ptr + offs2, mask=mask_half, other=0.0).to(tl.float32)
        ROUNDS: tl.constexpr = weight_ptr.dtype.element_ty == dtype
        x1 = (normalised(x1, inverse_rms, dtype, ROUNDS) * w1[None, :]).to(dtype).to(tl.float32)
        x2 = (normalised(x2, inverse_rms, dtype, ROUNDS) * w2[None, :]).to(dtype).to(tl.float32)
        if BLOCK_REST > 0:
            w3 = tl.load(weight_ptr + offs_rest, mask=mask_rest_1d, other=0.0).to(tl.float32)
            x3 = normalised(x3, inverse_rms, dtype, ROUNDS) * w3[None, :]
    y1 = (x1 * cos[None, :] - x2 * sin[None, :]).to(dtype)
    y2 = (x2 * cos[None, :] + x1 * sin[None, :]).to(dtype)
    if scales_ptrs is not None:
        absmax = tl.maximum(largest_of_heads(y1), largest_of_heads(y2), propagate_nan=tl.PropagateNan.ALL)
        if BLOCK_REST > 0:
            absmax = tl.maximum(absmax, largest_of_heads(x3.to(dtype)), propagate_nan=tl.PropagateNan.ALL)
        inverse_scale = new_scales(scales_ptrs, absmax, mask_heads, QMAX)
    store(out_ptrs + offs1[None, :], y1, inverse_scale, QMAX, mask)
    store(out_ptrs + offs2[None, :], y2, inverse_scale, QMAX, mask)
    if BLOCK_REST > 0:
        store(out_ptrs + offs_rest[None, :], x3.to(dtype), inverse_scale, QMAX, mask_rest)
