"""The kernels of decode attention: two ways to distribute tiles of keys over programs.

A part is a program's partial result for one (row, KV head) pair from some of the pair's tiles: the running maximum m,
sum l and unnormalised output acc of the GROUP query heads. A pair whose tiles one program has all processed is written
to the output directly; the parts of other pairs are written to slots of the scratch buffer, and the program that
finishes the last of them merges all of them, in the order of their keys, by

    out = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s * v_scale,   m = max_s m_s

Every part contains a visible key, so every m_s is finite. A sink is added once, to the sum of all parts. Scratch per
slot: m and l (GROUP,), acc (GROUP, D), float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight_kernels.attention.gpu._attention import attend_tiles, load_queries, sum_with_sinks
from inflight_kernels.common.last_program import is_last_program


@triton.jit
def _visible_tiles(seq_len, SLIDING_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First tile with a visible key and the tile after the last; equal for a row without keys."""
    first_tile = seq_len * 0
    if SLIDING_WINDOW > 0:
        first_tile = tl.maximum(seq_len - SLIDING_WINDOW, 0) // BLOCK_N
    return first_tile, tl.cdiv(seq_len, BLOCK_N)


@triton.jit
def _attend_part(
    q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, table_rows_ptr, row, head, seq_len,
    tile_begin, tile_end, qk_scale, tanh_scale, stride_qb, stride_qh, stride_cache_block, stride_cache_offset,
    stride_cache_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Attention of one pair's query heads, the rows of a tile, to key tiles [tile_begin, tile_end): (acc, m, l)."""
    offs_m = tl.arange(0, BLOCK_M)
    row_64 = row.to(tl.int64)
    table_row = row_64
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + row)
    head_64 = head.to(tl.int64)
    heads = head_64 * GROUP + offs_m
    q_ptrs = q_ptr + row_64 * stride_qb + heads[:, None] * stride_qh
    q = load_queries(q_ptrs, offs_m < GROUP, 0, VALUE_DIM, BLOCK_D)
    q_tail = load_queries(q_ptrs, offs_m < GROUP, VALUE_DIM, HEAD_DIM, BLOCK_TAIL) if BLOCK_TAIL > 0 else None
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    # One masked loop instead of two loops: memory is the bottleneck, and a second loop would drain the load pipeline.
    acc, m_i, l_i = attend_tiles(
        acc, m_i, l_i, q, q_tail, tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1), seq_len, tile_begin, tile_end,
        k_cache_ptr + head_64 * stride_cache_head, v_cache_ptr + head_64 * stride_cache_head,
        None if k_scales_ptr is None else k_scales_ptr + (0 if BLOCK_TAIL else head_64),
        None if v_scales_ptr is None else v_scales_ptr + (0 if BLOCK_TAIL else head_64),
        block_table_ptr + table_row * stride_table, stride_cache_block, stride_cache_offset, qk_scale, tanh_scale,
        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SLIDING_WINDOW, True, INPUT_PRECISION, BLOCK_N, BLOCK_D, BLOCK_TAIL,
    )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def _write_out(
    out_ptr, sinks_ptr, acc, m_i, l_i, row, head, v_scale, stride_ob, stride_oh,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_md = (offs_m < GROUP)[:, None] & (offs_d < VALUE_DIM)[None, :]
    sinks_head_ptr = None if sinks_ptr is None else sinks_ptr + head * GROUP
    # A padded row (seq_len 0) has l = 0 and acc = 0; its output is zeros.
    total = tl.where(l_i > 0.0, sum_with_sinks(m_i, l_i, sinks_head_ptr, offs_m, offs_m < GROUP), 1.0)
    out = acc / total[:, None] * v_scale
    heads = head.to(tl.int64) * GROUP + offs_m
    out_ptrs = out_ptr + row.to(tl.int64) * stride_ob + heads[:, None] * stride_oh + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_md)


@triton.jit
def _write_part(
    acc_ptr, m_ptr, l_ptr, acc, m_i, l_i, slot,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = offs_m < GROUP
    rows = slot.to(tl.int64) * GROUP + offs_m
    tl.store(m_ptr + rows, m_i, mask=mask_m)
    tl.store(l_ptr + rows, l_i, mask=mask_m)
    mask_md = mask_m[:, None] & (offs_d < VALUE_DIM)[None, :]
    tl.store(acc_ptr + rows[:, None] * VALUE_DIM + offs_d[None, :], acc, mask=mask_md)


@triton.jit
def _merge_parts(
    out_ptr, sinks_ptr, acc_ptr, m_ptr, l_ptr, parts, first_slot, next_slot, row, head, v_scale, stride_ob, stride_oh,
    SLOT_STEP: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one pair's output from its parts, BLOCK_S at a time. Part i > 0 is in slot `next_slot` + SLOT_STEP * i."""
    offs_s = tl.arange(0, BLOCK_S)
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    mask_g = offs_g < GROUP
    mask_gd = mask_g[:, None] & (offs_d < VALUE_DIM)[None, :]
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    m_i = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_G], dtype=tl.float32)
    for start in tl.range(0, parts, BLOCK_S):
        index = start + offs_s
        mask_s = index < parts
        slots = tl.where(index == 0, first_slot, next_slot + SLOT_STEP * index)
        rows = slots.to(tl.int64)[:, None] * GROUP + offs_g[None, :]
        mask_sg = mask_s[:, None] & mask_g[None, :]
        mask_sgd = mask_s[:, None, None] & mask_gd[None, :, :]
        acc_ptrs = acc_ptr + rows[:, :, None] * VALUE_DIM + offs_d[None, None, :]
        # Past the first level of cache, which does not see what other multiprocessors write.
        m_s = tl.load(m_ptr + rows, mask=mask_sg, other=float("-inf"), cache_modifier=".cg")
        l_s = tl.load(l_ptr + rows, mask=mask_sg, other=0.0, cache_modifier=".cg")
        acc_s = tl.load(acc_ptrs, mask=mask_sgd, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m_i, tl.max(m_s, axis=0))
        # Heads that pad the group have no maximum, and -inf - -inf would be NaN.
        m_safe = tl.where(mask_g, m_new, 0.0)
        alpha = tl.exp2(m_i - m_safe)
        weights = tl.exp2(m_s - m_safe[None, :])
        l_i = l_i * alpha + tl.sum(weights * l_s, axis=0)
        acc = acc * alpha[:, None] + tl.sum(acc_s * weights[:, :, None], axis=0)
        m_i = m_new
    sinks_head_ptr = None if sinks_ptr is None else sinks_ptr + head * GROUP
    total = tl.where(l_i > 0.0, sum_with_sinks(m_i, l_i, sinks_head_ptr, offs_g, mask_g), 1.0)
    out = acc / total[:, None] * v_scale
    heads = head.to(tl.int64) * GROUP + offs_g
    out_ptrs = out_ptr + row.to(tl.int64) * stride_ob + heads[:, None] * stride_oh + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_gd)


@triton.jit
def _tiles_of_split(tiles, num_splits):
    """Tiles per split of a fixed grid: the row's tiles divided evenly."""
    return tl.maximum(tl.cdiv(tiles, num_splits), 1)


# One compiled kernel for all batches: triton would otherwise specialise for widths and counts that are 1 or multiples
# of 16, and for pointers aligned to 16 bytes, which a slice of the lengths may not be.
@triton.jit(do_not_specialize=["table_rows_ptr", "seq_lens_ptr", "sinks_ptr", "stride_table"])
def decode_split_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    out_ptr,
    acc_ptr,
    m_ptr,
    l_ptr,
    counters_ptr,
    sinks_ptr,
    qk_scale,
    tanh_scale,
    v_scale,
    stride_qb,
    stride_qh,
    stride_cache_block,
    stride_cache_offset,
    stride_cache_head,
    stride_table,
    stride_ob,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Grid (Hkv, splits, B). Split s processes a row's s-th run of tiles; splits past the row's end return at once."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    num_splits = tl.num_programs(1)
    seq_len = tl.load(seq_lens_ptr + row)
    first_tile, end_tile = _visible_tiles(seq_len, SLIDING_WINDOW, BLOCK_N)
    tiles = end_tile - first_tile
    tiles_per_split = _tiles_of_split(tiles, num_splits)
    if split * tiles_per_split >= tl.maximum(tiles, 1):
        return
    tile_begin = first_tile + split * tiles_per_split
    tile_end = tl.minimum(tile_begin + tiles_per_split, end_tile)
    acc, m_i, l_i = _attend_part(
        q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, table_rows_ptr, row, head,
        seq_len, tile_begin, tile_end, qk_scale, tanh_scale, stride_qb, stride_qh, stride_cache_block,
        stride_cache_offset, stride_cache_head, stride_table,
        GROUP, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SLIDING_WINDOW, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_TAIL,
    )  # fmt: skip
    if tiles <= tiles_per_split:
        _write_out(
            out_ptr, sinks_ptr, acc, m_i, l_i, row, head, v_scale, stride_ob, stride_oh,
            GROUP, VALUE_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    else:
        pair = row.to(tl.int64) * tl.num_programs(0) + head
        first_slot = pair * num_splits
        _write_part(acc_ptr, m_ptr, l_ptr, acc, m_i, l_i, first_slot + split, GROUP, VALUE_DIM, BLOCK_M, BLOCK_D)
        parts = tl.cdiv(tiles, tiles_per_split)
        if is_last_program(counters_ptr + pair, parts):
            _merge_parts(
                out_ptr, sinks_ptr, acc_ptr, m_ptr, l_ptr, parts, first_slot, first_slot, row, head, v_scale,
                stride_ob, stride_oh, 1, GROUP, VALUE_DIM, BLOCK_S, BLOCK_G, BLOCK_D,
            )  # fmt: skip


@triton.jit(do_not_specialize=["table_rows_ptr", "seq_lens_ptr", "sinks_ptr", "batch", "stride_table"])
def decode_persistent_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    block_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    out_ptr,
    acc_ptr,
    m_ptr,
    l_ptr,
    counters_ptr,
    sinks_ptr,
    qk_scale,
    tanh_scale,
    v_scale,
    batch,
    stride_qb,
    stride_qh,
    stride_cache_block,
    stride_cache_offset,
    stride_cache_head,
    stride_table,
    stride_ob,
    stride_oh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Grid (programs,). The tiles of all pairs are numbered in one sequence, rows outermost; each program p processes
    an equally long run of them.

    A program finds the row in which its run begins by a prefix sum over the lengths, then continues from pair to pair.
    At most two of its pairs are shared with other programs: the one at the beginning of its run (slot 2p) and the one
    at the end (slot 2p + 1, or 2p if it is the same pair). The parts of a pair are in consecutive programs, and no
    other shared pair begins in the first of these: its counter is the pair's.
    """
    pid = tl.program_id(0)
    offs_b = tl.arange(0, BLOCK_B)
    mask_b = offs_b < batch
    lengths = tl.load(seq_lens_ptr + offs_b, mask=mask_b, other=0)
    first_tiles, end_tiles = _visible_tiles(lengths, SLIDING_WINDOW, BLOCK_N)
    # A padded row counts as one tile, so that some program writes its zeros.
    ends = tl.cumsum(tl.where(mask_b, tl.maximum(end_tiles - first_tiles, 1), 0), axis=0) * NUM_KV_HEADS
    total = tl.max(ends, axis=0)
    share = tl.cdiv(total, tl.num_programs(0))
    begin = pid * share
    stop = tl.minimum(begin + share, total)
    row = tl.sum((ends <= begin).to(tl.int32), axis=0)
    row_begin = tl.max(tl.where(ends <= begin, ends, 0), axis=0)

    place = begin
    while place < stop:
        seq_len = tl.load(seq_lens_ptr + row)
        first_tile, end_tile = _visible_tiles(seq_len, SLIDING_WINDOW, BLOCK_N)
        tiles = tl.maximum(end_tile - first_tile, 1)
        head = (place - row_begin) // tiles
        skipped = place - row_begin - head * tiles
        count = tl.minimum(tiles - skipped, stop - place)
        tile_begin = first_tile + skipped
        acc, m_i, l_i = _attend_part(
            q_ptr, k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, block_table_ptr, table_rows_ptr, row, head,
            seq_len, tile_begin, tl.minimum(tile_begin + count, end_tile), qk_scale, tanh_scale,
            stride_qb, stride_qh, stride_cache_block, stride_cache_offset, stride_cache_head, stride_table,
            GROUP, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, SLIDING_WINDOW, INPUT_PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
            BLOCK_TAIL,
        )  # fmt: skip
        if count == tiles:
            _write_out(
                out_ptr, sinks_ptr, acc, m_i, l_i, row, head, v_scale, stride_ob, stride_oh,
                GROUP, VALUE_DIM, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        else:
            slot = 2 * pid + (place > begin).to(tl.int32)
            _write_part(acc_ptr, m_ptr, l_ptr, acc, m_i, l_i, slot, GROUP, VALUE_DIM, BLOCK_M, BLOCK_D)
            pair_begin = place - skipped
            first = pair_begin // share
            parts = (pair_begin + tiles - 1) // share - first + 1
            if is_last_program(counters_ptr + first, parts):
                first_slot = 2 * first + (pair_begin > first * share).to(tl.int32)
                _merge_parts(
                    out_ptr, sinks_ptr, acc_ptr, m_ptr, l_ptr, parts, first_slot, 2 * first, row, head, v_scale,
                    stride_ob, stride_oh, 2, GROUP, VALUE_DIM, BLOCK_S, BLOCK_G, BLOCK_D,
                )  # fmt: skip
        place += count
        if place - row_begin == tiles * NUM_KV_HEADS:
            row_begin = place
            row += 1
