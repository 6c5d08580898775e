"""Slots of a paged KV cache by a row's block tables. The same torch on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def cache_slots(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """G times int64 (T,): the slot of each of the `positions` of the `rows` (int64, (T,)) of `block_tables` (R, G,
    max_blocks), in each of the G groups."""
    _, num_groups, max_blocks = block_tables.shape
    entries = torch.add(positions.div(block_size, rounding_mode="floor"), rows, alpha=num_groups * max_blocks)
    offsets, blocks = positions.remainder(block_size), block_tables.view(-1)
    return tuple(
        torch.add(offsets, blocks.index_select(0, entries + group * max_blocks if group else entries), alpha=block_size)
        for group in range(num_groups)
    )
