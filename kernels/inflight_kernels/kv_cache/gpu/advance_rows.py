"""The tokens of a step of decodes from the state of its rows, in one launch: their ids, positions and cache slots.

    position = length[row] + offset      end = length[row] + count
    id = given id, or last token[row] if that is below 0
    slot[group] = table[row, group, position // block_size] * block_size + position % block_size, or -1 for padding
    length[row] = end

About 100 bytes a token, which is nothing: three loads, each of which needs what the one before has brought, are about
2 us. One program does all: it must have read every length before it writes the first, because a row that verifies
drafts stands here several times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight_kernels.common.checks import check_dtype, check_unit_stride, check_vector, next_power_of_2
from inflight_kernels.kv_cache import reference
from inflight_kernels.kv_cache.step_tokens import StepTokens

# Of one program: four for each of its 256 threads. Torch computes more, and steps with longer rows.
MAX_TOKENS = 1024


@triton.jit(do_not_specialize=["rows_ptr", "counts_ptr", "offsets_ptr", "given_ids_ptr", "num_tokens", "padding_row"])
def advance_rows_kernel(
    rows_ptr,
    counts_ptr,
    offsets_ptr,
    given_ids_ptr,
    lengths_ptr,
    last_tokens_ptr,
    block_tables_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    ends_ptr,
    seq_lens_ptr,
    num_tokens,
    stride_row,
    stride_group,
    stride_slots,
    padding_row,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    offs = tl.arange(0, BLOCK_T)
    mask = offs < num_tokens
    rows = tl.load(rows_ptr + offs, mask=mask, other=0)
    positions = tl.load(lengths_ptr + rows, mask=mask, other=0)
    token_ids = tl.load(last_tokens_ptr + rows, mask=mask, other=0)
    ends = positions + tl.load(counts_ptr + offs, mask=mask, other=0)
    if offsets_ptr is not None:
        positions += tl.load(offsets_ptr + offs, mask=mask, other=0)
    if given_ids_ptr is not None:
        given_ids = tl.load(given_ids_ptr + offs, mask=mask, other=-1)
        token_ids = tl.where(given_ids < 0, token_ids, given_ids)
    entry_ptrs = block_tables_ptr + rows * stride_row + positions // BLOCK_SIZE
    for group in tl.static_range(NUM_GROUPS):
        blocks = tl.load(entry_ptrs + group * stride_group, mask=mask, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        if padding_row is not None:
            slots = tl.where(rows == padding_row, -1, slots)
        tl.store(slots_ptr + group * stride_slots + offs, slots, mask=mask)
    tl.store(token_ids_ptr + offs, token_ids, mask=mask)
    tl.store(positions_ptr + offs, positions, mask=mask)
    tl.store(ends_ptr + offs, ends, mask=mask)
    tl.store(seq_lens_ptr + offs, ends.to(tl.int32), mask=mask)
    # A row may stand in several places: all of them have read its length first.
    tl.debug_barrier()
    tl.store(lengths_ptr + rows, ends, mask=mask)


def advance_rows(
    rows: Tensor,
    counts: Tensor,
    lengths: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    padding_row: int | None = None,
    offsets: Tensor | None = None,
    token_ids: Tensor | None = None,
    places: Tensor | None = None,
) -> StepTokens:
    """Launch the step's first kernel; see `inflight_kernels.advance_rows`."""
    num_tokens = len(rows)
    if places is not None or num_tokens > MAX_TOKENS:
        return reference.advance_rows(
            rows, counts, lengths, last_tokens, block_tables, block_size, padding_row, offsets, token_ids, places
        )
    check_vector("rows", rows, num_tokens, torch.int64)
    for name, vector in (("counts", counts), ("offsets", offsets), ("token_ids", token_ids)):
        if vector is not None:
            check_vector(name, vector, num_tokens, torch.int64)
    if block_tables.dim() != 3:
        raise ValueError(f"block_tables must be (rows, groups, max_blocks), got {tuple(block_tables.shape)}")
    num_rows, num_groups, _ = block_tables.shape
    check_dtype("block_tables", block_tables, torch.int32)
    check_unit_stride("block_tables", block_tables)
    check_vector("lengths", lengths, num_rows, torch.int64)
    check_vector("last_tokens", last_tokens, num_rows, torch.int64)
    ids, positions, ends = (torch.empty_like(rows) for _ in range(3))
    # Each group's begin at a multiple of 16 bytes: kernels are compiled for pointers that do.
    stride_slots = num_tokens + num_tokens % 2
    slots = torch.empty((num_groups, stride_slots), dtype=torch.int64, device=rows.device)
    seq_lens = torch.empty(num_tokens, dtype=torch.int32, device=rows.device)
    if num_tokens:
        block = max(next_power_of_2(num_tokens), 32)
        advance_rows_kernel[(1,)](
            rows,
            counts,
            offsets,
            token_ids,
            lengths,
            last_tokens,
            block_tables,
            ids,
            positions,
            slots,
            ends,
            seq_lens,
            num_tokens,
            block_tables.stride(0),
            block_tables.stride(1),
            stride_slots,
            padding_row,
            NUM_GROUPS=num_groups,
            BLOCK_SIZE=block_size,
            BLOCK_T=block,
            num_warps=max(block // 128, 1),
        )
    return StepTokens(
        token_ids=ids,
        rows=rows,
        positions=positions,
        slots=tuple(of_group[:num_tokens] for of_group in slots.unbind(0)),
        ends=ends,
        seq_lens=seq_lens,
    )
