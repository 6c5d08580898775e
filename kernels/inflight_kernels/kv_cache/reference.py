"""Slots of a step's tokens, and copies of whole KV blocks, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight_kernels.kv_cache import on_host
from inflight_kernels.kv_cache.slots import cache_slots
from inflight_kernels.kv_cache.step_tokens import StepTokens


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
    """See inflight_kernels.advance_rows. Does not wait for a device."""
    advance = on_host.advance_rows if rows.device.type == "cpu" else advance_in_torch
    return advance(
        rows, counts, lengths, last_tokens, block_tables, block_size, padding_row, offsets, token_ids, places
    )


def advance_in_torch(
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
    """The same on any device; adds to the length of each row its number of tokens."""
    begins = lengths.index_select(0, rows)
    ends = begins + counts
    lengths.index_copy_(0, rows, ends)
    positions, rows_of_tokens, ends_of_tokens = begins, rows, ends
    if places is not None:
        positions, rows_of_tokens = begins.index_select(0, places), rows.index_select(0, places)
    if offsets is not None:
        positions = positions + offsets
    if places is not None:
        ends_of_tokens = positions + 1
    ids = last_tokens.index_select(0, rows_of_tokens)
    if token_ids is not None:
        ids = torch.where(token_ids < 0, ids, token_ids)
    slots = cache_slots(block_tables, rows_of_tokens, positions, block_size)
    if padding_row is not None:
        is_padding = rows_of_tokens == padding_row
        for of_group in slots:
            of_group.masked_fill_(is_padding, -1)
    return StepTokens(
        token_ids=ids,
        rows=rows_of_tokens,
        positions=positions,
        slots=slots,
        ends=ends_of_tokens,
        seq_lens=ends.int(),
    )


def copy_blocks(caches: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """Copy blocks within every tensor; pairs with a negative number are skipped."""
    kept = (source >= 0) & (target >= 0)
    source, target = source[kept].long(), target[kept].long()
    for cache in caches:
        # torch cannot index float8 tensors; a uint8 view shares their memory.
        blocks = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        blocks[target] = blocks[source]
