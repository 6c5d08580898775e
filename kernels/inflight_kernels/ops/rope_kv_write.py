"""Optional per-head RMSNorm of q and k, rotary embedding of both, and the KV-cache write, in one launch.

    n = round(weight * round(x / sqrt(mean(x^2) + eps)))        (only with norm weights, as Qwen3 does)
    [x1 x2 x3] = n      x1, x2 of R = rotary_dim / 2 elements, x3 the rest of the head
    y = round([x1 cos - x2 sin | x2 cos + x1 sin | x3])         (half-split rotation, as Llama and GPT-NeoX do)

q goes to a new tensor; k and v go to slot = block * block_size + offset of the cache, where slot >= 0.
Bytes per token: 2 (Hq + 2 Hkv) D times the size of the dtype, and 8 R for the table; memory is the floor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.ops._checks import (
    cdiv,
    check_dtype,
    check_float,
    check_kv_cache,
    check_shape,
    check_unit_stride,
    check_vector,
    next_power_of_2,
)

# Elements of one kind of head that one program rotates: enough for 16-byte loads by four warps. Not measured yet.
TILE_ELEMENTS = 1024


@triton.jit
def _rotate(
    in_ptrs, out_ptrs, mask_heads, cos, sin, weight_ptr, eps, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr
):  # fmt: skip
    """Norm and rotate one tile of heads; `in_ptrs`, `out_ptrs` (BLOCK_HEADS, 1) point at the heads' first elements."""
    dtype = out_ptrs.dtype.element_ty
    offs_half = tl.arange(0, BLOCK_HALF)
    mask_half = offs_half < HALF
    mask = mask_heads[:, None] & mask_half[None, :]
    x1 = tl.load(in_ptrs + offs_half[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(in_ptrs + HALF + offs_half[None, :], mask=mask, other=0.0).to(tl.float32)
    if BLOCK_REST > 0:
        offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        mask_rest_1d = offs_rest < HEAD_DIM
        mask_rest = mask_heads[:, None] & mask_rest_1d[None, :]
        x3 = tl.load(in_ptrs + offs_rest[None, :], mask=mask_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        if BLOCK_REST > 0:
            squares += tl.sum(x3 * x3, axis=1)
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        w1 = tl.load(weight_ptr + offs_half, mask=mask_half, other=0.0).to(tl.float32)
        w2 = tl.load(weight_ptr + HALF + offs_half, mask=mask_half, other=0.0).to(tl.float32)
        x1 = ((x1 * inverse_rms).to(dtype).to(tl.float32) * w1[None, :]).to(dtype).to(tl.float32)
        x2 = ((x2 * inverse_rms).to(dtype).to(tl.float32) * w2[None, :]).to(dtype).to(tl.float32)
        if BLOCK_REST > 0:
            w3 = tl.load(weight_ptr + offs_rest, mask=mask_rest_1d, other=0.0).to(tl.float32)
            x3 = (x3 * inverse_rms).to(dtype).to(tl.float32) * w3[None, :]
    tl.store(out_ptrs + offs_half[None, :], (x1 * cos[None, :] - x2 * sin[None, :]).to(dtype), mask=mask)
    tl.store(out_ptrs + HALF + offs_half[None, :], (x2 * cos[None, :] + x1 * sin[None, :]).to(dtype), mask=mask)
    if BLOCK_REST > 0:
        tl.store(out_ptrs + offs_rest[None, :], x3.to(dtype), mask=mask_rest)


@triton.jit
def rope_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_norm_weight_ptr,
    k_norm_weight_ptr,
    norm_eps,
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
    HAS_NORM: tl.constexpr,
    NUM_Q_TILES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid_t = tl.program_id(0).to(tl.int64)
    pid_h = tl.program_id(1)
    position = tl.load(positions_ptr + pid_t)
    offs_half = tl.arange(0, BLOCK_HALF)
    table_ptrs = cos_sin_ptr + position * stride_table + offs_half
    cos = tl.load(table_ptrs, mask=offs_half < HALF, other=0.0)
    sin = tl.load(table_ptrs + HALF, mask=offs_half < HALF, other=0.0)

    if pid_h < NUM_Q_TILES:
        offs_h = (pid_h * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        in_ptrs = q_ptr + pid_t * stride_qt + offs_h[:, None] * stride_qh
        out_ptrs = q_out_ptr + pid_t * stride_ot + offs_h[:, None] * stride_oh
        _rotate(
            in_ptrs, out_ptrs, offs_h < NUM_Q_HEADS, cos, sin, q_norm_weight_ptr, norm_eps,
            HEAD_DIM, HALF, HAS_NORM, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + pid_t)
        if slot >= 0:
            offs_h = ((pid_h - NUM_Q_TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
            mask_heads = offs_h < NUM_KV_HEADS
            place = (slot // BLOCK_SIZE) * stride_cache_block + (slot % BLOCK_SIZE) * stride_cache_offset
            out_offs = place + offs_h[:, None] * stride_cache_head
            _rotate(
                k_ptr + pid_t * stride_kt + offs_h[:, None] * stride_kh, k_cache_ptr + out_offs, mask_heads, cos, sin,
                k_norm_weight_ptr, norm_eps, HEAD_DIM, HALF, HAS_NORM, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
            offs_d = tl.arange(0, BLOCK_D)
            mask = mask_heads[:, None] & (offs_d < HEAD_DIM)[None, :]
            v = tl.load(v_ptr + pid_t * stride_vt + offs_h[:, None] * stride_vh + offs_d[None, :], mask=mask)
            tl.store(v_cache_ptr + out_offs + offs_d[None, :], v, mask=mask)


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
    check_kv_cache(k_cache, v_cache, k.shape[1], head_dim, q.dtype)
    if (norm_weights[0] is None) != (norm_weights[1] is None):
        raise ValueError("q_norm_weight and k_norm_weight must be given together")
    for name, weight in zip(("q_norm_weight", "k_norm_weight"), norm_weights, strict=True):
        if weight is not None:
            check_vector(name, weight, head_dim, q.dtype)


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
) -> Tensor:
    """Launch the fused rotation and cache write; see `inflight_kernels.rope_and_kv_write`."""
    _check(q, k, v, cos_sin, positions, k_cache, v_cache, slot_mapping, (q_norm_weight, k_norm_weight))
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    half = cos_sin.shape[1] // 2
    rest = head_dim - 2 * half
    block_d = next_power_of_2(head_dim)
    block_heads = min(max(TILE_ELEMENTS // block_d, 1), next_power_of_2(max(num_q_heads, num_kv_heads)))
    num_q_tiles = cdiv(num_q_heads, block_heads)
    rope_kv_write_kernel[(num_tokens, num_q_tiles + cdiv(num_kv_heads, block_heads))](
        q,
        k,
        v,
        q_out,
        k_cache,
        v_cache,
        cos_sin,
        positions,
        slot_mapping,
        q if q_norm_weight is None else q_norm_weight,
        k if k_norm_weight is None else k_norm_weight,
        norm_eps,
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
        HAS_NORM=q_norm_weight is not None,
        NUM_Q_TILES=num_q_tiles,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_REST=next_power_of_2(rest) if rest else 0,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return q_out
