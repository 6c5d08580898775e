"""Causal attention of ragged query chunks over a paged KV cache that already holds their keys and values.

    p_ij = softmax_j(scale * q_i . k_j),   o_i = sum_j p_ij v_j,   over keys j <= i (and j > i - w with a window w)

i and j are positions in the sequence: the queries of sequence b are its last query_len positions. Grid (query tiles,
Hkv, B): the G = Hq / Hkv heads that share a KV head are packed with BLOCK_Q tokens as the rows of one tile, so K and V
are read once for the group. Tiles of keys that every row sees run in a loop without masks; those on the diagonal and on
the window's edge run apart; those that no row sees are never visited. Softmax in base 2, log2(e) folded into the scale.
Operations: 4 D per (query, visible key, query head); matrix throughput is the floor.
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
    compute_capability,
    kv_stages,
    next_power_of_2,
)
from inflight_kernels.ops.decode_attention import LOG2_E

# Keys a tile: one whole block of 64, or the tokens of several smaller blocks. Not measured yet.
BLOCK_KEYS = 64
# Before Hopper the query tile lives in registers: 64 keys of 128 spill 64 to 212 bytes on sm_80 (ptxas, triton 3.8).
BLOCK_KEYS_WIDE_HEAD_BEFORE_HOPPER = 32
# Rows (query tokens times grouped heads) a tile: 128 feed two warp groups of Hopper's matrix unit; 64 keep more
# programs busy when chunks are short. Not measured yet.
LONG_ROWS = 128
SHORT_ROWS = 64


@triton.jit
def _attend_tiles(
    acc, m_i, l_i, q, query_positions, seq_len, tile_begin, tile_end, k_cache_ptr, v_cache_ptr, table_row_ptr,
    stride_cache_block, stride_cache_offset, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLIDING_WINDOW: tl.constexpr, MASKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold key tiles [tile_begin, tile_end) into the running softmax; MASKED where some row does not see some key."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    for tile in tl.range(tile_begin, tile_end):
        start = tile * BLOCK_N
        keys = start + offs_n
        if BLOCK_SIZE % BLOCK_N == 0:
            # The tile lies in one block: one table entry serves it, and offsets within a block fit int32.
            block = tl.load(table_row_ptr + start // BLOCK_SIZE).to(tl.int64)
            base = block * stride_cache_block + (start % BLOCK_SIZE) * stride_cache_offset
            places = offs_n * stride_cache_offset
        else:
            # Keys past the sequence's end stand in no table entry of its own: they read block 0 and are masked.
            blocks = tl.load(table_row_ptr + keys // BLOCK_SIZE, mask=keys < seq_len, other=0).to(tl.int64)
            base = tl.full([], 0, tl.int64)
            places = blocks * stride_cache_block + (keys % BLOCK_SIZE) * stride_cache_offset
        if MASKED:
            mask_n = keys < seq_len
            k_mask = mask_n[None, :] & mask_d[:, None]
            v_mask = mask_n[:, None] & mask_d[None, :]
        else:
            k_mask = mask_d[:, None]
            v_mask = mask_d[None, :]
        k = tl.load(k_cache_ptr + base + (places[None, :] + offs_d[:, None]), mask=k_mask, other=0.0)
        v = tl.load(v_cache_ptr + base + (places[:, None] + offs_d[None, :]), mask=v_mask, other=0.0)
        scores = tl.dot(q, k, input_precision=INPUT_PRECISION) * qk_scale
        if MASKED:
            visible = keys[None, :] <= query_positions[:, None]
            if SLIDING_WINDOW > 0:
                visible = visible & (keys[None, :] > query_positions[:, None] - SLIDING_WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        m_safe = m_new
        if MASKED:
            # A row may have seen no key yet: -inf - -inf would be NaN.
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        p = tl.exp2(scores - m_safe[:, None])
        l_i = l_i * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=INPUT_PRECISION)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit
def prefill_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    qk_scale,
    stride_qt,
    stride_qh,
    stride_cache_block,
    stride_cache_offset,
    stride_cache_head,
    stride_table,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The last query tile sees the most keys: start it first, so that no long tile is left over at the end.
    pid_q = tl.num_programs(0) - 1 - tl.program_id(0)
    pid_h = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)

    query_begin = tl.load(query_start_loc_ptr + pid_b)
    query_len = tl.load(query_start_loc_ptr + pid_b + 1) - query_begin
    if pid_q * BLOCK_Q >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + pid_b)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    tokens = pid_q * BLOCK_Q + offs_m // GROUP
    heads = pid_h * GROUP + offs_m % GROUP
    mask_m = (offs_m < BLOCK_Q * GROUP) & (tokens < query_len)
    mask_md = mask_m[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = (query_begin + tokens).to(tl.int64)
    q_offs = rows[:, None] * stride_qt + heads[:, None].to(tl.int64) * stride_qh + offs_d[None, :]
    q = tl.load(q_ptr + q_offs, mask=mask_md, other=0.0)

    first_position = seq_len - query_len + pid_q * BLOCK_Q
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    query_positions = seq_len - query_len + tokens
    # Tiles [tile_lo, tile_hi) hold a key that some row sees, [full_lo, full_hi) only keys that every row sees.
    tile_lo = 0
    full_lo = 0
    tile_hi = tl.cdiv(last_position + 1, BLOCK_N)
    full_hi = (first_position + 1) // BLOCK_N
    if SLIDING_WINDOW > 0:
        tile_lo = tl.maximum(first_position - SLIDING_WINDOW + 1, 0) // BLOCK_N
        full_lo = tl.minimum(tl.cdiv(tl.maximum(last_position - SLIDING_WINDOW + 1, 0), BLOCK_N), tile_hi)
        full_hi = tl.maximum(full_hi, full_lo)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    k_head_ptr = k_cache_ptr + pid_h.to(tl.int64) * stride_cache_head
    v_head_ptr = v_cache_ptr + pid_h.to(tl.int64) * stride_cache_head
    table_row_ptr = block_table_ptr + pid_b * stride_table
    if SLIDING_WINDOW > 0:
        acc, m_i, l_i = _attend_tiles(
            acc, m_i, l_i, q, query_positions, seq_len, tile_lo, full_lo, k_head_ptr, v_head_ptr, table_row_ptr,
            stride_cache_block, stride_cache_offset, qk_scale,
            HEAD_DIM, BLOCK_SIZE, SLIDING_WINDOW, True, INPUT_PRECISION, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    acc, m_i, l_i = _attend_tiles(
        acc, m_i, l_i, q, query_positions, seq_len, full_lo, full_hi, k_head_ptr, v_head_ptr, table_row_ptr,
        stride_cache_block, stride_cache_offset, qk_scale,
        HEAD_DIM, BLOCK_SIZE, SLIDING_WINDOW, False, INPUT_PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, m_i, l_i = _attend_tiles(
        acc, m_i, l_i, q, query_positions, seq_len, full_hi, tile_hi, k_head_ptr, v_head_ptr, table_row_ptr,
        stride_cache_block, stride_cache_offset, qk_scale,
        HEAD_DIM, BLOCK_SIZE, SLIDING_WINDOW, True, INPUT_PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    out = acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    out_offs = rows[:, None] * stride_ot + heads[:, None].to(tl.int64) * stride_oh + offs_d[None, :]
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=mask_md)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor | None,
    window: int,
) -> None:
    check_float("q", q)
    if q.dim() != 3:
        raise ValueError(f"q must be (num_tokens, num_heads, head_dim), got {tuple(q.shape)}")
    check_unit_stride("q", q)
    check_kv_cache(k_cache, v_cache, None, q.shape[2], q.dtype)
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_cache.shape[2]} KV heads evenly")
    batch = seq_lens.shape[0]
    check_vector("seq_lens", seq_lens, batch, torch.int32)
    check_vector("query_start_loc", query_start_loc, batch + 1, torch.int32)
    check_dtype("block_table", block_table, torch.int32)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must be (batch {batch}, max_blocks), got {tuple(block_table.shape)}")
    check_unit_stride("block_table", block_table)
    if out is not None:
        check_shape("out", out, tuple(q.shape))
        check_dtype("out", out, q.dtype)
        check_unit_stride("out", out)
    if window < 0:
        raise ValueError(f"sliding_window must be 0 (off) or positive, got {window}")


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Launch prefill attention; see `inflight_kernels.prefill_attention`."""
    _check(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, out, sliding_window)
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    batch, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch == 0 or max_query_len == 0:
        return out
    group = num_q_heads // num_kv_heads
    block_d = max(next_power_of_2(head_dim), 16)
    # Long rows of float32 or of wide heads would not fit the registers.
    long_rows = max_query_len * group > SHORT_ROWS and block_d * q.element_size() <= 256
    block_m = max(LONG_ROWS if long_rows else SHORT_ROWS, next_power_of_2(group))
    block_q = block_m // group
    block_n = BLOCK_KEYS
    if block_d >= 128 and compute_capability(q.device) < 90:
        block_n = BLOCK_KEYS_WIDE_HEAD_BEFORE_HOPPER
    prefill_attention_kernel[(cdiv(max_query_len, block_q), num_kv_heads, batch)](
        q,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        seq_lens,
        out,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        SLIDING_WINDOW=sliding_window,
        # Exact products keep fp32 comparable to the reference; fp16 and bf16 do not look at this.
        INPUT_PRECISION="ieee",
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        # 64 accumulators a thread at 128 rows of 128. Not measured yet.
        num_warps=8 if block_m >= LONG_ROWS else 4,
        num_stages=kv_stages(block_n, block_d, q.element_size()),
    )
    return out
