"""Memory on huge pages, for weights. A decode step reads each weight once, and with pages of 4 KiB it waits for 500
times as many entries of the page table: matrix-vector loops made by inductor took 11.8 ms for
212 MB, and 10.1 on pages of 2 MiB (2 cores of a Xeon in a virtual machine, 2026-11-21).
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_REGION_BYTES = 256 * 2**20
_ALIGNMENT = 64
"""A cache line."""


class HugePageArena:
    """Tensors one after the other in large regions; on usual pages where the system has no others.

    A region is given back when nobody holds a tensor of it any more. What of a region is not used yet takes no memory.
    """

    is_filled = False
    """See WeightMemory."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """(num_elements) zeros that start at a cache line."""
        num_bytes = num_elements * dtype.itemsize
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > self._region.numel():
            self._region, start = _map_region(max(num_bytes, _REGION_BYTES)), 0
        self._used = start + num_bytes
        return self._region[start : self._used].view(dtype)

    def release(self, tensor: Tensor) -> None:
        """See WeightMemory; of a tensor that was not taken here, but has memory of its own."""
        tensor.untyped_storage().resize_(0)


def _map_region(num_bytes: int) -> Tensor:
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Python's headers know of huge pages or not, and so may the kernel.
    with contextlib.suppress(AttributeError, OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)
