"""Optional per-head RMSNorm of q and k, rotary embedding of both, and the KV-cache write, in one launch.

    n = round(weight * round(x / sqrt(mean(x^2) + eps)))        (only with norm weights, as Qwen3 does; inner round()
                                                                only if they have the dtype of x)
    [x1 x2 x3] = n      x1, x2 of R = rotary_dim / 2 elements, x3 the rest of the head
    y = round([x1 cos - x2 sin | x2 cos + x1 sin | x3])         (half-split rotation, as Llama and GPT-NeoX do; with
                                                                 ADJACENT_PAIRS elements of x1 and x2 alternate)
    k, v of a cache in float8_e4m3fn: round(clamp(y * (1 / k_scale), -448, 448)), v with v_scale
    k, v of a cache in int8: quantised by head, as in common/quantize.py

q goes to a new tensor; k and v go to slot = block * block_size + offset of the cache, where slot >= 0.

Bytes per token in bf16: 4 (Hq + 2 Hkv) D, 8 R for the row of cos_sin, 16 for position and slot; a cache of one byte per
element saves 2 Hkv D. About 6 operations per element, 10 with the norm: memory bandwidth is the lower bound. 32/8 heads
of 128: 25104 bytes per token; 16384 tokens 411 MB, 96 us at 4.3 TB/s (fp8 cache 378 MB, 88 us); 64 tokens 1.6 MB,
0.4 us, so that latency dominates: load the position, then the row of cos_sin, while q, k and v are in flight.

A few threads of one warp normalise and rotate a head in the same way in every launch, whatever the number of tokens: a
token's result is bitwise the same alone and in any batch.
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
from inflight_kernels.common.rows import num_programs
from inflight_kernels.rope.gpu._rotation import largest_of_heads, new_scales, rotate_heads, store
from inflight_kernels.tuning import tuned

# Heads per program that rotates q, heads per program that writes k and v, warps, and resident programs per
# multiprocessor and tile of heads, which process several tokens (0: one token per program).
CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"BLOCK_Q_HEADS": 8, "BLOCK_KV_HEADS": 8, "num_warps": 4, "PROGRAMS_PER_SM": 0},
    {"BLOCK_Q_HEADS": 16, "BLOCK_KV_HEADS": 8, "num_warps": 4, "PROGRAMS_PER_SM": 0},
    {"BLOCK_Q_HEADS": 32, "BLOCK_KV_HEADS": 8, "num_warps": 4, "PROGRAMS_PER_SM": 0},
    {"BLOCK_Q_HEADS": 32, "BLOCK_KV_HEADS": 16, "num_warps": 8, "PROGRAMS_PER_SM": 0},
    {"BLOCK_Q_HEADS": 16, "BLOCK_KV_HEADS": 8, "num_warps": 4, "PROGRAMS_PER_SM": 4},
)


def default_config(num_q_heads: int, num_kv_heads: int, head_dim: int) -> Mapping[str, int]:
    """The launch for these numbers of heads. Not measured yet.

    A program of q holds 2048 elements (16 heads of 128), one of k and v has 2048 for both together: with four warps
    each load moves 16 bytes of bf16 per thread. Four warps and not two, because triton 3.8 loads a row of cos_sin
    directly in the layout of the heads only if it has fewer elements than the program has threads; else through shared
    memory.
    """
    tile = max(2048 // next_power_of_2(head_dim), 1)
    return {
        "BLOCK_Q_HEADS": min(tile, next_power_of_2(num_q_heads)),
        "BLOCK_KV_HEADS": min(max(tile // 2, 1), next_power_of_2(num_kv_heads)),
        "num_warps": 4,
        "PROGRAMS_PER_SM": 0,
    }


# One compiled kernel for all batches: triton would otherwise specialise for 1 token, for multiples of 16, and for
# positions or slots aligned to 16 bytes.
@triton.jit(do_not_specialize=["positions_ptr", "slot_mapping_ptr", "num_tokens"])
def rope_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_norm_weight_ptr,
    k_norm_weight_ptr,
    norm_eps,
    k_inverse_scale,
    v_inverse_scale,
    num_tokens,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_cache_block,
    stride_cache_offset,
    stride_cache_head,
    stride_table,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QMAX: tl.constexpr,
    ADJACENT_PAIRS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Neighbouring programs process the tiles of one token, which share its row of cos_sin and adjacent q, k and v.
    NUM_Q_TILES: tl.constexpr = (NUM_Q_HEADS + BLOCK_Q_HEADS - 1) // BLOCK_Q_HEADS
    NUM_TILES: tl.constexpr = NUM_Q_TILES + (NUM_KV_HEADS + BLOCK_KV_HEADS - 1) // BLOCK_KV_HEADS
    pid_h = tl.program_id(0) % NUM_TILES
    for token in tl.range(tl.program_id(0) // NUM_TILES, num_tokens, tl.num_programs(0) // NUM_TILES):
        pid_t = tl.cast(token, tl.int64)
        position = tl.load(positions_ptr + pid_t)
        if pid_h < NUM_Q_TILES:
            offs_h = (pid_h * BLOCK_Q_HEADS + tl.arange(0, BLOCK_Q_HEADS)).to(tl.int64)
            rotate_heads(
                q_ptr + pid_t * stride_qt + offs_h[:, None] * stride_qh,
                q_out_ptr + pid_t * stride_ot + offs_h[:, None] * stride_oh,
                offs_h < NUM_Q_HEADS, position, cos_sin_ptr, stride_table, q_norm_weight_ptr, norm_eps, None, None,
                HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, QMAX, ADJACENT_PAIRS,
            )  # fmt: skip
        else:
            slot = tl.load(slot_mapping_ptr + pid_t)
            if slot >= 0:
                offs_h = ((pid_h - NUM_Q_TILES) * BLOCK_KV_HEADS + tl.arange(0, BLOCK_KV_HEADS)).to(tl.int64)
                mask_heads = offs_h < NUM_KV_HEADS
                place = (slot // BLOCK_SIZE) * stride_cache_block + (slot % BLOCK_SIZE) * stride_cache_offset
                out_offs = place + offs_h[:, None] * stride_cache_head
                offs_d = tl.arange(0, BLOCK_D)
                mask = mask_heads[:, None] & (offs_d < HEAD_DIM)[None, :]
                v_ptrs = v_ptr + pid_t * stride_vt + offs_h[:, None] * stride_vh + offs_d[None, :]
                v = tl.load(v_ptrs, mask=mask, other=0.0)
                scale_places = slot * NUM_KV_HEADS + offs_h
                rotate_heads(
                    k_ptr + pid_t * stride_kt + offs_h[:, None] * stride_kh, k_cache_ptr + out_offs,
                    mask_heads, position, cos_sin_ptr, stride_table, k_norm_weight_ptr, norm_eps, k_inverse_scale,
                    None if k_scales_ptr is None else k_scales_ptr + scale_places,
                    HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, QMAX, ADJACENT_PAIRS,
                )  # fmt: skip
                v_inverse = v_inverse_scale
                if v_scales_ptr is not None:
                    v_inverse = new_scales(v_scales_ptr + scale_places, largest_of_heads(v), mask_heads, QMAX)
                store(v_cache_ptr + out_offs + offs_d[None, :], v, v_inverse, QMAX, mask)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    norm_weights: tuple[Tensor | None, Tensor | None],
    scales: tuple[float | Tensor, float | Tensor],
) -> None:
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(f"q and k must be (num_tokens, num_heads, head_dim), got {tuple(q.shape)}, {tuple(k.shape)}")
    num_tokens, _, head_dim = q.shape
    check_float("q", q)
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(name, tensor, q.dtype)
        check_shape(name, tensor, (num_tokens, k.shape[1], head_dim))
    for name, tensor in (("q", q), ("k", k), ("v", v), ("cos_sin", cos_sin)):
        check_unit_stride(name, tensor)
    check_dtype("cos_sin", cos_sin, torch.float32)
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim:
        raise ValueError(
            f"cos_sin must be (max_positions, rotary_dim) with an even rotary_dim of at most {head_dim}, "
            f"got {tuple(cos_sin.shape)}"
        )
    check_vector("positions", positions, num_tokens, torch.int64)
    check_vector("slot_mapping", slot_mapping, num_tokens, torch.int64)
    quantized_cache = k_cache.dtype in LARGEST
    check_kv_cache(k_cache, v_cache, k.shape[1], head_dim, k_cache.dtype if quantized_cache else q.dtype)
    check_fp8_device(k_cache.dtype, k_cache.device)
    check_slot_scales(k_cache, scales)
    for scale in scales:
        if isinstance(scale, Tensor):
            continue
        if not quantized_cache and scale != 1.0:
            raise ValueError(f"k_scale and v_scale are for a cache of torch.float8_e4m3fn, this one is {k_cache.dtype}")
        if scale <= 0.0:
            raise ValueError(f"k_scale and v_scale must be positive, got {scale}")
    if (norm_weights[0] is None) != (norm_weights[1] is None):
        raise ValueError("q_norm_weight and k_norm_weight must be given together")
    for name, weight in zip(("q_norm_weight", "k_norm_weight"), norm_weights, strict=True):
        if weight is not None:
            check_vector(name, weight, head_dim, torch.float32 if weight.dtype == torch.float32 else q.dtype)


def rope_and_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    adjacent_pairs: bool = False,
    *,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch the fused rotation and cache write; see `inflight_kernels.rope_and_kv_write`."""
    norm_weights, scales = (q_norm_weight, k_norm_weight), (k_scale, v_scale)
    _check(q, k, v, cos_sin, positions, k_cache, v_cache, slot_mapping, norm_weights, scales)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    if config is None:
        # The number of tokens is left out, because the order of a head's sum must not depend on the batch.
        shape = {"q_heads": num_q_heads, "kv_heads": num_kv_heads, "head_dim": str(head_dim), "dtype": str(q.dtype)}
        config = tuned("rope_and_kv_write", shape, default_config(num_q_heads, num_kv_heads, head_dim), q.device)
    half = cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    num_tiles = cdiv(num_q_heads, config["BLOCK_Q_HEADS"]) + cdiv(num_kv_heads, config["BLOCK_KV_HEADS"])
    rope_kv_write_kernel[(num_programs(num_tokens, config["PROGRAMS_PER_SM"], q.device) * num_tiles,)](
        q,
        k,
        v,
        q_out,
        k_cache,
        v_cache,
        k_scale if isinstance(k_scale, Tensor) else None,
        v_scale if isinstance(v_scale, Tensor) else None,
        cos_sin,
        positions,
        slot_mapping,
        q_norm_weight,
        k_norm_weight,
        norm_eps,
        *(
            1.0 / scale if k_cache.dtype != q.dtype and not isinstance(scale, Tensor) else None
            for scale in (k_scale, v_scale)
        ),
        num_tokens,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        q_out.stride(0),
        q_out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        cos_sin.stride(0),
        HEAD_DIM=head_dim,
        HALF=half,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=k_cache.shape[1],
        QMAX=LARGEST.get(k_cache.dtype),
        ADJACENT_PAIRS=adjacent_pairs,
        BLOCK_Q_HEADS=config["BLOCK_Q_HEADS"],
        BLOCK_KV_HEADS=config["BLOCK_KV_HEADS"],
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(rest) if rest else 0,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=config["num_warps"],
    )
    return q_out


def rope(
    q: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    adjacent_pairs: bool = False,
) -> Tensor:
    """Launch the rotation of queries alone; see `inflight_kernels.rope`: of no key heads, whose cache is empty."""
    none = q[:, :0]
    cache = q.new_empty((0, 1, 0, q.shape[2]))
    return rope_and_kv_write(
        q, none, none, cos_sin, positions, cache, cache, positions, norm_weight, norm_weight, norm_eps,
        adjacent_pairs=adjacent_pairs,
    )  # fmt: skip
