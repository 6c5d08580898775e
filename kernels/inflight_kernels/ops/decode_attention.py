"""Attention of one new token per sequence over a paged KV cache, split along the KV length (flash decoding).

    p_j = softmax_j(scale * q . k_j),   o = sum_j p_j v_j,   over the visible keys j < seq_len (and > seq_len - 1 - w)

Stage 1, grid (B, Hkv, splits): each program takes the G = Hq / Hkv query heads that share one KV head as the rows of
its tile, walks one part of the keys and keeps a running maximum m, sum l and unnormalised output in base 2.
Stage 2, grid (B, Hq): out = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s; a part that saw no key has m = -inf and
weighs nothing. With one split, stage 1 writes the result itself.
The number of splits depends on shapes alone, so that a CUDA graph captured for a batch size replays for any lengths.
Bytes: 2 seq_len Hkv D times the size of the dtype per sequence; memory is the floor.
"""

from __future__ import annotations

import math

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
    kv_stages,
    multiprocessor_count,
    next_power_of_2,
)

# Programs wanted per multiprocessor before splitting stops: two in flight hide each other's loads. Not measured yet.
PROGRAMS_PER_MULTIPROCESSOR = 2
# More parts than this cost more to merge than they win. Not measured yet.
MAX_SPLITS = 64
# Keys a tile: one whole block of 64, or the tokens of several smaller blocks. Not measured yet.
BLOCK_KEYS = 64
LOG2_E = math.log2(math.e)


@triton.jit
def decode_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    out_ptr,
    acc_ptr,
    m_ptr,
    l_ptr,
    qk_scale,
    stride_qb,
    stride_qh,
    stride_cache_block,
    stride_cache_offset,
    stride_cache_head,
    stride_table,
    stride_ob,
    stride_oh,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid_b = tl.program_id(0).to(tl.int64)
    pid_h = tl.program_id(1)
    pid_s = tl.program_id(2)

    seq_len = tl.load(seq_lens_ptr + pid_b)
    first_key = 0
    if SLIDING_WINDOW > 0:
        first_key = tl.maximum(seq_len - SLIDING_WINDOW, 0)
    # Whole tiles are dealt out, so that a tile never crosses the border of two splits.
    first_tile = first_key // BLOCK_N
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len, BLOCK_N) - first_tile, NUM_SPLITS)
    begin = (first_tile + pid_s * tiles_per_split) * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, seq_len)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < GROUP
    mask_d = offs_d < HEAD_DIM
    heads = pid_h * GROUP + offs_m
    mask_md = mask_m[:, None] & mask_d[None, :]
    q_ptrs = q_ptr + pid_b * stride_qb + heads[:, None].to(tl.int64) * stride_qh + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask_md, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    head_offset = pid_h.to(tl.int64) * stride_cache_head
    table_row_ptr = block_table_ptr + pid_b * stride_table

    for start in tl.range(begin, end, BLOCK_N):
        keys = start + offs_n
        mask_n = keys < seq_len
        if BLOCK_SIZE % BLOCK_N == 0:
            # The tile lies in one block: one table entry serves it, and offsets within a block fit int32.
            block = tl.load(table_row_ptr + start // BLOCK_SIZE).to(tl.int64)
            base = block * stride_cache_block + (start % BLOCK_SIZE) * stride_cache_offset + head_offset
            places = offs_n * stride_cache_offset
        else:
            blocks = tl.load(table_row_ptr + keys // BLOCK_SIZE, mask=mask_n, other=0).to(tl.int64)
            base = head_offset
            places = blocks * stride_cache_block + (keys % BLOCK_SIZE) * stride_cache_offset
        k_ptrs = k_cache_ptr + base + (places[None, :] + offs_d[:, None])
        v_ptrs = v_cache_ptr + base + (places[:, None] + offs_d[None, :])
        k = tl.load(k_ptrs, mask=mask_n[None, :] & mask_d[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=mask_n[:, None] & mask_d[None, :], other=0.0)

        scores = tl.dot(q, k, input_precision=INPUT_PRECISION) * qk_scale
        visible = mask_n
        if SLIDING_WINDOW > 0:
            visible = mask_n & (keys >= first_key)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        # begin lies in a tile with a visible key and end is at most seq_len: no tile is wholly masked, m is finite.
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(scores - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=INPUT_PRECISION)
        m_i = m_new

    if NUM_SPLITS == 1:
        # A padded row (seq_len 0) has l = 0 and acc = 0 and gives zeros.
        out = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
        out_ptrs = out_ptr + pid_b * stride_ob + heads[:, None].to(tl.int64) * stride_oh + offs_d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_md)
    else:
        rows = (pid_b * NUM_Q_HEADS + heads) * NUM_SPLITS + pid_s
        tl.store(m_ptr + rows, m_i, mask=mask_m)
        tl.store(l_ptr + rows, l_i, mask=mask_m)
        if begin < end:
            tl.store(acc_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask_md)


@triton.jit
def merge_splits_kernel(
    acc_ptr,
    m_ptr,
    l_ptr,
    out_ptr,
    stride_ob,
    stride_oh,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid_b = tl.program_id(0).to(tl.int64)
    pid_h = tl.program_id(1)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    mask_s = offs_s < NUM_SPLITS
    mask_d = offs_d < HEAD_DIM
    rows = (pid_b * NUM_Q_HEADS + pid_h) * NUM_SPLITS + offs_s

    m_s = tl.load(m_ptr + rows, mask=mask_s, other=float("-inf"))
    l_s = tl.load(l_ptr + rows, mask=mask_s, other=0.0)
    # An empty split never wrote its acc, so it is not read either: what lies there may be NaN.
    seen = l_s > 0.0
    acc_s = tl.load(
        acc_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :], mask=seen[:, None] & mask_d[None, :], other=0.0
    )
    m = tl.max(m_s, axis=0)
    weights = tl.where(seen, tl.exp2(m_s - tl.where(m > float("-inf"), m, 0.0)), 0.0)
    total = tl.sum(weights * l_s, axis=0)
    out = tl.sum(acc_s * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    out_ptrs = out_ptr + pid_b * stride_ob + pid_h.to(tl.int64) * stride_oh + offs_d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_d)


def decode_num_splits(batch: int, num_kv_heads: int, max_keys: int, device: torch.device) -> int:
    """Splits of the KV length for a batch shape: a power of two, by shapes alone, never by what the lengths are."""
    programs = max(batch * num_kv_heads, 1)
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(device) // programs
    most = min(MAX_SPLITS, cdiv(max_keys, BLOCK_KEYS))
    splits = 1
    while splits * 2 <= min(wanted, most):
        splits *= 2
    return splits


def decode_scratch_elements(batch: int, num_q_heads: int, head_dim: int, num_splits: int = MAX_SPLITS) -> int:
    """Float32 elements of scratch that a call needs at most; allocate once and pass it for CUDA graphs."""
    return batch * num_q_heads * num_splits * (head_dim + 2)


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor | None, window: int
) -> None:
    check_float("q", q)
    if q.dim() != 3:
        raise ValueError(f"q must be (batch, num_heads, head_dim), one token a sequence, got {tuple(q.shape)}")
    check_unit_stride("q", q)
    check_kv_cache(k_cache, v_cache, None, q.shape[2], q.dtype)
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads evenly")
    check_dtype("block_table", block_table, torch.int32)
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(f"block_table must be (batch {q.shape[0]}, max_blocks), got {tuple(block_table.shape)}")
    check_unit_stride("block_table", block_table)
    check_vector("seq_lens", seq_lens, q.shape[0], torch.int32)
    if out is not None:
        check_shape("out", out, tuple(q.shape))
        check_dtype("out", out, q.dtype)
        check_unit_stride("out", out)
    if window < 0:
        raise ValueError(f"sliding_window must be 0 (off) or positive, got {window}")


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Launch decode attention; see `inflight_kernels.decode_attention`. `num_splits` overrides the choice by shape."""
    _check(q, k_cache, v_cache, block_table, seq_lens, out, sliding_window)
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    if num_splits is None:
        num_splits = decode_num_splits(batch, num_kv_heads, block_table.shape[1] * block_size, q.device)
    elements = decode_scratch_elements(batch, num_q_heads, head_dim, num_splits) if num_splits > 1 else 0
    if scratch is None:
        scratch = torch.empty(elements, dtype=torch.float32, device=q.device)
    elif scratch.dtype != torch.float32 or scratch.numel() < elements or not scratch.is_contiguous():
        raise ValueError(f"scratch must be contiguous float32 of at least {elements} elements, got {scratch.numel()}")
    group = num_q_heads // num_kv_heads
    block_d = max(next_power_of_2(head_dim), 16)
    rows = batch * num_q_heads * num_splits
    flat = scratch.view(-1)
    acc, m, sums = flat[2 * rows :], flat[:rows], flat[rows : 2 * rows]
    if num_splits == 1:
        acc = m = sums = out
    decode_attention_kernel[(batch, num_kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        acc,
        m,
        sums,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        NUM_Q_HEADS=num_q_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SLIDING_WINDOW=sliding_window,
        NUM_SPLITS=num_splits,
        # Three tf32 passes would do for fp32 too; exact products keep fp32 comparable to the reference.
        INPUT_PRECISION="ieee",
        # tl.dot wants at least 16 rows.
        BLOCK_M=max(16, next_power_of_2(group)),
        BLOCK_N=BLOCK_KEYS,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=kv_stages(BLOCK_KEYS, block_d, q.element_size()),
    )
    if num_splits > 1:
        merge_splits_kernel[(batch, num_q_heads)](
            acc,
            m,
            sums,
            out,
            out.stride(0),
            out.stride(1),
            NUM_Q_HEADS=num_q_heads,
            HEAD_DIM=head_dim,
            NUM_SPLITS=num_splits,
            BLOCK_S=next_power_of_2(num_splits),
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out
