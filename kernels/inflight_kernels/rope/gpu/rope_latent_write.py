"""What attention to latents needs of a step's tokens, in one launch: the norm of each latent, the rotation of the key
behind it, both written to the token's slot, and the rotation of a part of each query.

    c = round(weight * round(latent / sqrt(mean(latent^2) + eps)))      (L,)
    k = rotate(key, cos_sin[position])                                  (R,)
    cache[slot] = [c | k]          out[h] = rotate(q[h], cos_sin[position]) for each query head

Rounding, pairs and quantised caches as in `rope_kv_write`: of int8 the whole row has one scale.

Bytes for a token in bf16: 4 Hq R of queries, 4 (L + R) of the latent and its row, 4 R of cos_sin: 34 KB of DeepSeek-V3
(128 heads, L 512, R 64), of which 33 are queries. About 4 operations per element: memory bandwidth is the lower bound.
16384 tokens: 0.56 GB, 130 us at 4.3 TB/s. One program has the latent of a token, others a tile of its heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import (
    cdiv,
    check_dtype,
    check_float,
    check_kv_cache,
    check_shape,
    check_slot_scales,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)
from inflight_kernels.common.quantize import LARGEST, check_fp8_device
from inflight_kernels.rope.gpu._rotation import largest_of_heads, new_scales, normalised, rotate_heads, store
from inflight_kernels.tuning import tuned

# Heads of a program that rotates queries.
CANDIDATES: tuple[Mapping[str, int], ...] = tuple(
    {"BLOCK_HEADS": heads, "num_warps": warps} for heads, warps in ((16, 4), (32, 4), (64, 4), (64, 8))
)


def default_config(num_heads: int, rotary_dim: int) -> Mapping[str, int]:
    """2048 elements a program, as `rope_kv_write` has them. Not measured yet."""
    heads = max(2048 // next_power_of_2(rotary_dim), 1)
    return {"BLOCK_HEADS": min(heads, next_power_of_2(num_heads)), "num_warps": 4}


@triton.jit
def _write_latent(
    latent_ptr, cache_ptr, position, cos_sin_ptr, stride_table, weight_ptr, eps, inverse_scale, scale_ptrs,
    SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr, QMAX: tl.constexpr,
    ADJACENT_PAIRS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one row, the only head of a tile; its scale is found and stored where there are
    `scale_ptrs` (1,)."""
    dtype = latent_ptr.dtype.element_ty
    offs = tl.arange(0, BLOCK_SIZE)[None, :]
    offs_half = tl.arange(0, BLOCK_HALF)[None, :]
    mask, mask_half = offs < SIZE, offs_half < HALF
    offs1 = SIZE + offs_half
    offs2 = SIZE + HALF + offs_half
    if ADJACENT_PAIRS:
        offs1 = SIZE + 2 * offs_half
        offs2 = SIZE + 2 * offs_half + 1
    x = tl.load(latent_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(latent_ptr + offs1, mask=mask_half, other=0.0).to(tl.float32)
    x2 = tl.load(latent_ptr + offs2, mask=mask_half, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    table_ptrs = cos_sin_ptr + position * stride_table + offs_half
    cos = tl.load(table_ptrs, mask=mask_half, other=0.0)
    sin = tl.load(table_ptrs + HALF, mask=mask_half, other=0.0)
    inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    ROUNDS: tl.constexpr = weight_ptr.dtype.element_ty == dtype
    y = (normalised(x, inverse_rms, dtype, ROUNDS) * weight).to(dtype)
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)
    if scale_ptrs is not None:
        of_pairs = tl.maximum(largest_of_heads(y1), largest_of_heads(y2), propagate_nan=tl.PropagateNan.ALL)
        absmax = tl.maximum(largest_of_heads(y), of_pairs, propagate_nan=tl.PropagateNan.ALL)
        inverse_scale = new_scales(scale_ptrs, absmax, tl.full([1], 1, tl.int1), QMAX)
    store(cache_ptr + offs, y, inverse_scale, QMAX, mask)
    store(cache_ptr + offs1, y1, inverse_scale, QMAX, mask_half)
    store(cache_ptr + offs2, y2, inverse_scale, QMAX, mask_half)


# One compiled kernel for all batches: triton would otherwise specialise for 1 token, for multiples of 16, and for
# positions or slots aligned to 16 bytes.
@triton.jit(do_not_specialize=["positions_ptr", "slot_mapping_ptr", "num_tokens"])
def rope_latent_write_kernel(
    q_ptr,
    latent_ptr,
    out_ptr,
    cache_ptr,
    scales_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    weight_ptr,
    eps,
    inverse_scale,
    num_tokens,
    stride_qt,
    stride_qh,
    stride_latent,
    stride_ot,
    stride_oh,
    stride_cache_block,
    stride_cache_offset,
    stride_table,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QMAX: tl.constexpr,
    ADJACENT_PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    # Neighbouring programs have one token, whose row of cos_sin they share.
    NUM_TILES: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    pid_h = tl.program_id(0) % (NUM_TILES + 1)
    pid_t = tl.cast(tl.program_id(0) // (NUM_TILES + 1), tl.int64)
    position = tl.load(positions_ptr + pid_t)
    if pid_h < NUM_TILES:
        offs_h = (pid_h * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        rotate_heads(
            q_ptr + pid_t * stride_qt + offs_h[:, None] * stride_qh,
            out_ptr + pid_t * stride_ot + offs_h[:, None] * stride_oh,
            offs_h < NUM_HEADS, position, cos_sin_ptr, stride_table, None, eps, None, None,
            2 * HALF, HALF, BLOCK_HALF, 0, QMAX, ADJACENT_PAIRS,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + pid_t)
        if slot >= 0:
            place = (slot // BLOCK_SIZE) * stride_cache_block + (slot % BLOCK_SIZE) * stride_cache_offset
            _write_latent(
                latent_ptr + pid_t * stride_latent, cache_ptr + place, position, cos_sin_ptr, stride_table,
                weight_ptr, eps, inverse_scale,
                None if scales_ptr is None else scales_ptr + slot + tl.arange(0, 1),
                SIZE, HALF, BLOCK_LATENT, BLOCK_HALF, QMAX, ADJACENT_PAIRS,
            )  # fmt: skip


def _check(
    q: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor | None,
    scale: float | Tensor,
) -> None:
    check_float("q", q)
    if q.dim() != 3 or q.shape[2] % 2:
        raise ValueError(f"q must be (num_tokens, num_heads, rotary_dim), an even number, got {tuple(q.shape)}")
    num_tokens, _, rotary_dim = q.shape
    size = norm_weight.shape[0] + rotary_dim
    check_dtype("latent", latent, q.dtype)
    check_shape("latent", latent, (num_tokens, size))
    check_dtype("cos_sin", cos_sin, torch.float32)
    check_shape("cos_sin", cos_sin, (cos_sin.shape[0], rotary_dim))
    for name, tensor in (("q", q), ("latent", latent), ("cos_sin", cos_sin)):
        check_unit_stride(name, tensor)
    if out is not None:
        check_dtype("out", out, q.dtype)
        check_shape("out", out, tuple(q.shape))
        check_unit_stride("out", out)
    weight_dtype = torch.float32 if norm_weight.dtype == torch.float32 else q.dtype
    check_vector("norm_weight", norm_weight, norm_weight.shape[0], weight_dtype)
    check_vector("positions", positions, num_tokens, torch.int64)
    check_vector("slot_mapping", slot_mapping, num_tokens, torch.int64)
    is_quantized = cache.dtype in LARGEST
    check_kv_cache(cache, cache, 1, size, cache.dtype if is_quantized else q.dtype)
    check_fp8_device(cache.dtype, cache.device)
    check_slot_scales(cache, (scale, scale))
    if not isinstance(scale, Tensor) and (scale <= 0.0 or (scale != 1.0 and not is_quantized)):
        raise ValueError(f"scale must be positive, and 1 unless the cache is quantised, got {scale} for {cache.dtype}")


def rope_and_latent_write(
    q: Tensor,
    latent: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    out: Tensor | None = None,
    scale: float | Tensor = 1.0,
    adjacent_pairs: bool = False,
    *,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the norm, rotation and cache write; see `inflight_kernels.rope_and_latent_write`."""
    _check(q, latent, norm_weight, cos_sin, positions, cache, slot_mapping, out, scale)
    num_tokens, num_heads, rotary_dim = q.shape
    size, half = norm_weight.shape[0], rotary_dim // 2
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if config is None:
        # The number of tokens is left out, because the order of a sum must not depend on the batch.
        shape = {"heads": num_heads, "latent": str(size), "rotary_dim": str(rotary_dim), "dtype": str(q.dtype)}
        config = tuned("rope_and_latent_write", shape, default_config(num_heads, rotary_dim), q.device)
    num_tiles = cdiv(num_heads, config["BLOCK_HEADS"]) + 1
    rope_latent_write_kernel[(num_tokens * num_tiles,)](
        q,
        latent,
        out,
        cache,
        scale if isinstance(scale, Tensor) else None,
        cos_sin,
        positions,
        slot_mapping,
        norm_weight,
        norm_eps,
        1.0 / scale if cache.dtype != q.dtype and not isinstance(scale, Tensor) else None,
        num_tokens,
        q.stride(0),
        q.stride(1),
        latent.stride(0),
        out.stride(0),
        out.stride(1),
        cache.stride(0),
        cache.stride(1),
        cos_sin.stride(0),
        SIZE=size,
        HALF=half,
        NUM_HEADS=num_heads,
        BLOCK_SIZE=cache.shape[1],
        QMAX=LARGEST.get(cache.dtype),
        ADJACENT_PAIRS=adjacent_pairs,
        BLOCK_HEADS=config["BLOCK_HEADS"],
        BLOCK_LATENT=next_power_of_2(size),
        BLOCK_HALF=next_power_of_2(half),
        num_warps=config["num_warps"],
    )
    return out
