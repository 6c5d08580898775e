"""Causal attention of ragged query chunks over a paged KV cache that already holds their keys and values.

    p_ij = softmax_j(scale * k_scale * q_i . k_j),   o_i = v_scale * sum_j p_ij v_j,
    over keys j <= i (and j > i - w with a window w); see `decode_attention` for a soft cap and sinks

i and j are positions in the sequence: the queries of sequence b are its last query_len positions. Grid (query tiles
* Hkv, B): the G = Hq / Hkv heads that share a KV head are packed with BLOCK_Q tokens as the BLOCK_M rows of one tile,
so K and V are read once for the group and the diagonal is BLOCK_Q keys wide. Tiles of keys that are visible to every
row are processed in a loop without masks; those on the diagonal and at the window's edge in loops with masks; those
that are visible to no row are skipped.

Tiles of keys begin at multiples of BLOCK_N in the sequence, and a masked tile computes the same as an unmasked one (see
`_attention`): a row's bits do not depend on its place in a chunk. `deterministic` only makes the launch configuration
independent of the batch, and decode attention a chunk of one token for each sequence (ONE_QUERY): the shape of a tile
decides which matrix instruction multiplies it, so both must use the same.

Operations: 4 Hq D for each pair of a query and a visible key: 0.55e12 for 8192 queries from the start (33.6e6 pairs),
Hq = 32, D = 128; 0.58e12 for 2048 queries after 16384 keys. Bytes: q and out 4 T Hq D, the cache 4 S Hkv D once: 0.17
and 0.11 GB, 40 and 25 us at 4.3 TB/s. Matrix throughput is the lower bound: 0.70 and 0.73 ms at an H200's 790 TFLOP/s.
exp2 takes another half of that (per tile 64 x 128 of them at 16 per cycle, against 4.2e6 operations at 4096 per cycle),
which is hidden behind the products as far as warp groups overlap: two programs run on a multiprocessor for that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.attention.gpu._attention import (
    KeyHeads,
    attend_tiles,
    check_attention,
    check_scales,
    launch_options,
    load_queries,
    score_scales,
    slot_scales,
    sum_with_sinks,
)
from inflight_kernels.common.checks import (
    cdiv,
    check_vector,
    compute_capability,
    multiprocessor_count,
    next_power_of_2,
)
from inflight_kernels.tuning import tuned

# Rows (query tokens times grouped heads) per tile. A tile of 128 rows, two warp groups of Hopper's matrix unit, reads a
# key from the L2 cache for 128 operations a byte, 64 rows for 64: at the 5.5 TB/s or so of that cache 350 TFLOP/s. They
# keep more programs busy when chunks are short. Not measured yet.
LONG_ROWS = 128
SHORT_ROWS = 64
# What the tuning script tries. `num_stages` tiles of K and V have a buffer, one less before Hopper. With 128 registers
# a thread two programs of 8 warps fit on a multiprocessor: one computes its softmax while the other multiplies. 64 keys
# of 128 do not fit into that: 64 registers of output, 32 of products and 16 of probabilities leave 16. The first two
# are for Hopper (sm_100 spills 24 bytes), the third for Hopper and later (sm_80 spills; ptxas, triton 3.7).
CANDIDATES: tuple[Mapping[str, int], ...] = (
    {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 4, "maxnreg": 128},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 0},
    {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 0},
    {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 0},
)


# One compiled kernel for all batches: triton would otherwise specialise for widths and counts that are 1 or multiples
# of 16, and for pointers aligned to 16 bytes, which a slice of the lengths may not be.
@triton.jit(do_not_specialize=["table_rows_ptr", "query_start_loc_ptr", "seq_lens_ptr", "sinks_ptr", "stride_table"])
def prefill_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    block_table_ptr,
    table_rows_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    out_ptr,
    sinks_ptr,
    qk_scale,
    tanh_scale,
    v_scale,
    stride_qt,
    stride_qh,
    stride_cache_block,
    stride_cache_offset,
    stride_cache_head,
    stride_table,
    stride_ot,
    stride_oh,
    ONE_QUERY: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    # Programs are ordered by sequence, so that those that run together share keys in the L2 cache. Within a sequence
    # the last query tile, which has the most keys, comes first, so that no long tile is left for the end.
    pid_h = tl.program_id(0) % NUM_KV_HEADS
    pid_q = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    pid_b = tl.program_id(1).to(tl.int64)

    if ONE_QUERY:
        query_begin = pid_b
        query_len = 1
    else:
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
    rows = (query_begin + tokens).to(tl.int64)
    q_ptrs = q_ptr + rows[:, None] * stride_qt + heads[:, None].to(tl.int64) * stride_qh
    q = load_queries(q_ptrs, mask_m, 0, VALUE_DIM, BLOCK_D)
    q_tail = load_queries(q_ptrs, mask_m, VALUE_DIM, HEAD_DIM, BLOCK_TAIL) if BLOCK_TAIL > 0 else None

    first_position = seq_len - query_len + pid_q * BLOCK_Q
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    query_positions = seq_len - query_len + tokens
    # Tiles [tile_lo, tile_hi) hold a key visible to some row; [full_lo, full_hi) hold only keys visible to every row.
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
    k_scales_head_ptr = None if k_scales_ptr is None else k_scales_ptr + (0 if BLOCK_TAIL else pid_h)
    v_scales_head_ptr = None if v_scales_ptr is None else v_scales_ptr + (0 if BLOCK_TAIL else pid_h)
    table_row = pid_b
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + pid_b)
    table_row_ptr = block_table_ptr + table_row * stride_table
    if SLIDING_WINDOW > 0:
        acc, m_i, l_i = attend_tiles(
            acc, m_i, l_i, q, q_tail, query_positions, seq_len, tile_lo, full_lo, k_head_ptr, v_head_ptr,
            k_scales_head_ptr, v_scales_head_ptr, table_row_ptr, stride_cache_block, stride_cache_offset, qk_scale,
            tanh_scale, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SLIDING_WINDOW, True, INPUT_PRECISION, BLOCK_N, BLOCK_D,
            BLOCK_TAIL,
        )  # fmt: skip
    acc, m_i, l_i = attend_tiles(
        acc, m_i, l_i, q, q_tail, query_positions, seq_len, full_lo, full_hi, k_head_ptr, v_head_ptr,
        k_scales_head_ptr, v_scales_head_ptr, table_row_ptr, stride_cache_block, stride_cache_offset, qk_scale,
        tanh_scale, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SLIDING_WINDOW, False, INPUT_PRECISION, BLOCK_N, BLOCK_D,
        BLOCK_TAIL,
    )  # fmt: skip
    acc, m_i, l_i = attend_tiles(
        acc, m_i, l_i, q, q_tail, query_positions, seq_len, full_hi, tile_hi, k_head_ptr, v_head_ptr,
        k_scales_head_ptr, v_scales_head_ptr, table_row_ptr, stride_cache_block, stride_cache_offset, qk_scale,
        tanh_scale, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SLIDING_WINDOW, True, INPUT_PRECISION, BLOCK_N, BLOCK_D,
        BLOCK_TAIL,
    )  # fmt: skip

    total = tl.where(l_i > 0.0, sum_with_sinks(m_i, l_i, sinks_ptr, heads, offs_m < BLOCK_Q * GROUP), 1.0)
    out = acc / total[:, None] * v_scale
    # Where to write is computed again, from what is read again: kept through the loops, it would be spilled to memory.
    if not ONE_QUERY:
        query_begin = tl.load(query_start_loc_ptr + pid_b, volatile=True)
        query_len = tl.load(query_start_loc_ptr + pid_b + 1, volatile=True) - query_begin
    mask_m = (offs_m < BLOCK_Q * GROUP) & (tokens < query_len)
    mask_md = mask_m[:, None] & (offs_d < VALUE_DIM)[None, :]
    rows = (query_begin + tokens).to(tl.int64)
    out_offs = rows[:, None] * stride_ot + heads[:, None].to(tl.int64) * stride_oh + offs_d[None, :]
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=mask_md)


def default_config(
    rows: int,
    programs_of_long_rows: int,
    head_dim: int,
    element_size: int,
    device: torch.device,
    *,
    has_slot_scales: bool = False,
) -> dict[str, int]:
    """Reasoned, not measured yet. `rows`: of the longest chunk. `programs_of_long_rows`: grid with tiles of
    LONG_ROWS."""
    if head_dim > 256:
        return latent_config(element_size, has_slot_scales=has_slot_scales)
    if element_size == 4:
        # Exact products are computed in registers: 32 rows of 128 by 32 keys already spill (ptxas, triton 3.7).
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3, "maxnreg": 0}
    row_bytes = max(next_power_of_2(head_dim), 16) * element_size
    # Tiles of LONG_ROWS with wide heads would not fit into the registers.
    long_rows = row_bytes <= 256 and rows > SHORT_ROWS and programs_of_long_rows >= multiprocessor_count(device)
    capability = compute_capability(device)
    # Two programs on a multiprocessor: see `CANDIDATES`. Blackwell's accumulators are not in registers, but what is
    # computed from them is, twice.
    # With the scales of slots they spill 32 bytes (ptxas, triton 3.7).
    two_programs = long_rows and 90 <= capability < 100 and not has_slot_scales
    # Before Hopper and on sm_120 the query tile lives in registers: 64 keys of 128 spill on sm_80 (ptxas, triton 3.8).
    few_registers = not 90 <= capability < 120 or two_programs
    return {
        "BLOCK_M": LONG_ROWS if long_rows else SHORT_ROWS,
        "BLOCK_N": 32 if few_registers and row_bytes >= 256 else 64,
        # Heads of 256 spill 1216 bytes with 4 warps on sm_90 (ptxas, triton 3.8).
        "num_warps": 8 if long_rows or head_dim > 128 else 4,
        # Heads of 256 have space for two buffers.
        "num_stages": 3 if row_bytes <= 256 else 2,
        "maxnreg": 128 if two_programs else 0,
    }


def latent_config(element_size: int, *, has_slot_scales: bool = False) -> dict[str, int]:
    """The same for latents, and for heads of 512, whose tiles are as wide as four heads: 64 rows spill up to 200 bytes,
    and with the scales of slots 32 keys 16 (ptxas, triton 3.7). Not measured yet. `element_size`: of q."""
    if element_size == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2, "maxnreg": 0}
    return {"BLOCK_M": 32, "BLOCK_N": 16 if has_slot_scales else 32, "num_warps": 8, "num_stages": 2, "maxnreg": 0}


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    out: Tensor | None = None,
    *,
    table_rows: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    deterministic: bool = False,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Launch prefill attention; see `inflight_kernels.prefill_attention`. `query_start_loc`: None = a query for each
    sequence. `config` overrides the tuned one."""
    batch = seq_lens.shape[0]
    check_attention(q, k_cache, v_cache, (k_scale, v_scale), block_table, table_rows, batch, out, sinks)
    check_vector("seq_lens", seq_lens, batch, torch.int32)
    if query_start_loc is not None:
        check_vector("query_start_loc", query_start_loc, batch + 1, torch.int32)
    check_scales(scale, k_scale, v_scale, sliding_window, soft_cap)
    head_dim, value_dim, block_size = q.shape[2], v_cache.shape[3], k_cache.shape[1]
    if out is None:
        out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    if batch == 0 or max_query_len == 0:
        return out
    heads = KeyHeads.of(q, k_cache, v_cache)
    group = heads.group
    if config is None:
        shape: dict[str, int | str] = {
            "head_dim": heads.size(head_dim, value_dim),
            "group": group,
            "block_size": str(block_size),
            "cache": str(k_cache.dtype),
            "window": str(sliding_window > 0),
        }
        # Deterministic: the configuration for a very long chunk, for every batch.
        rows = programs = 1 << 30
        if not deterministic:
            rows = max_query_len * group
            programs = cdiv(max_query_len, max(LONG_ROWS // group, 1)) * heads.count * batch
            shape |= {"rows": next_power_of_2(rows), "programs": next_power_of_2(programs)}
        if heads.is_latent:
            default = latent_config(q.element_size(), has_slot_scales=isinstance(k_scale, Tensor))
        else:
            default = default_config(
                rows, programs, head_dim, q.element_size(), q.device, has_slot_scales=isinstance(k_scale, Tensor)
            )
        config = tuned("prefill_attention", shape, default, q.device)
    block_m = max(config["BLOCK_M"], next_power_of_2(group))
    block_q = block_m // group
    k_scale, v_scale, k_scales, v_scales = slot_scales(k_scale, v_scale)
    prefill_attention_kernel[(heads.count * cdiv(max_query_len, block_q), batch)](
        q,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        block_table,
        table_rows,
        seq_lens if query_start_loc is None else query_start_loc,
        seq_lens,
        out,
        sinks,
        *score_scales(scale, k_scale, soft_cap),
        v_scale,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        heads.stride,
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        ONE_QUERY=query_start_loc is None,
        NUM_KV_HEADS=heads.count,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        SLIDING_WINDOW=sliding_window,
        # Exact products keep float32 comparable to the reference; for float16 and bfloat16 this has no effect.
        INPUT_PRECISION="ieee",
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=config["BLOCK_N"],
        **heads.tiles(head_dim, value_dim),
        **launch_options(config),
    )
    return out
