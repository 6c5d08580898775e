"""A unit of the state store as bytes in host memory: all that layers keep of a block, or of a sequence, one after the
other."""

from __future__ import annotations

import torch
from torch import Tensor


class UnitBytes:
    """Copies units of one rank's store out and in. Bytes are uint8 tensors of `num_bytes`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        """`tensors`: those of all blocks, or of all slots (`StateStore.block_tensors`, `slot_tensors`)."""
        self._tensors = tensors
        self._sizes = [tensor[0].numel() * tensor.dtype.itemsize for tensor in tensors]
        self.num_bytes = sum(self._sizes)
        """0 = this rank's layers keep nothing of such a unit, and nothing is copied."""
        self._is_cuda = any(tensor.is_cuda for tensor in tensors)

    def read(self, unit: int, memory: Tensor) -> None:
        """Copy a unit to host memory, on a GPU in the order of its stream."""
        parts = [_bytes(tensor[unit]) for tensor in self._tensors]
        if self._is_cuda:
            # Gathered on the device first: one copy over the bus instead of some for each layer.
            memory.copy_(torch.cat(parts), non_blocking=True)
        elif parts:
            torch.cat(parts, out=memory)

    def write(self, memory: Tensor, unit: int) -> None:
        """Copy host memory to a unit, likewise."""
        if self._is_cuda:
            memory = memory.to(self._tensors[0].device, non_blocking=True)
        for part, tensor in zip(memory.split_with_sizes(self._sizes), self._tensors, strict=True):
            _bytes(tensor[unit]).copy_(part)


def _bytes(unit: Tensor) -> Tensor:
    return unit.view(-1).view(torch.uint8)
