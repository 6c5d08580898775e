"""A block of the state store as bytes in host memory: all that layers keep of it, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.runtime.state_store import StateStore


class BlockBytes:
    """Copies blocks of one rank's store out and in. Bytes are uint8 tensors of `StateShape.block_bytes`."""

    def __init__(self, store: StateStore) -> None:
        self._tensors = store.block_tensors
        self._sizes = [tensor[0].numel() * tensor.dtype.itemsize for tensor in self._tensors]
        self._is_cuda = any(tensor.is_cuda for tensor in self._tensors)

    def read(self, block_id: int, memory: Tensor) -> None:
        """Copy a block to host memory, on a GPU in the order of its stream."""
        parts = [_bytes(tensor[block_id]) for tensor in self._tensors]
        if self._is_cuda:
            # Gathered on the device first: one copy over the bus instead of two for each layer.
            memory.copy_(torch.cat(parts), non_blocking=True)
        else:
            torch.cat(parts, out=memory)

    def write(self, memory: Tensor, block_id: int) -> None:
        """Copy host memory to a block, likewise."""
        if self._is_cuda:
            memory = memory.to(self._tensors[0].device, non_blocking=True)
        for part, tensor in zip(memory.split_with_sizes(self._sizes), self._tensors, strict=True):
            _bytes(tensor[block_id]).copy_(part)


def _bytes(block: Tensor) -> Tensor:
    return block.view(-1).view(torch.uint8)
