"""Blocks of a checkpoint's tensors, in memory of this process."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.format import Block

CPU = torch.device("cpu")


def read_weight(
    checkpoint: Checkpoint, block: Block, dtype: torch.dtype, dtypes: tuple[str, ...], device: torch.device
) -> Tensor:
    """The block's part (O, I) of its tensor `weight`."""
    size = len(block.outputs), len(block.inputs)
    values = read_block(
        checkpoint,
        f"{block.name}.weight",
        block.shape,
        block.starts,
        size[::-1] if block.transposed else size,
        dtype,
        dtypes,
        device,
    )
    return values.T.contiguous() if block.transposed else values


def read_block(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    size: tuple[int, ...],
    dtype: torch.dtype,
    dtypes: tuple[str, ...],
    device: torch.device = CPU,
) -> Tensor:
    """The block of `size` that begins at `starts` in tensor `name`, whose `shape` and possible types are checked."""
    block = torch.empty(size, dtype=dtype, device=device)
    checkpoint.copy_into(block, name, shape, starts, dtypes)
    return block
