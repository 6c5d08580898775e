"""A block of the KV cache as bytes in host memory: all layers, keys and values, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.runtime.kv_cache import KVCache


class BlockBytes:
    """Copies blocks of one rank's cache out and in. Bytes are uint8 tensors of `KVCacheShape.block_bytes`."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._caches = kv_cache.tensors
        self._sizes = [cache[0].numel() * cache.dtype.itemsize for cache in self._caches]
        self._is_cuda = self._caches[0].device.type == "cuda"

    def read(self, block_id: int, memory: Tensor) -> None:
        """Copy a block to host memory, on a GPU in the order of its stream."""
        parts = [_bytes(cache[block_id]) for cache in self._caches]
        if self._is_cuda:
            # Gathered on the device first: one copy over the bus instead of two for each layer.
            memory.copy_(torch.cat(parts), non_blocking=True)
        else:
            torch.cat(parts, out=memory)

    def write(self, memory: Tensor, block_id: int) -> None:
        """Copy host memory to a block, likewise."""
        if self._is_cuda:
            memory = memory.to(self._caches[0].device, non_blocking=True)
        for part, cache in zip(memory.split_with_sizes(self._sizes), self._caches, strict=True):
            _bytes(cache[block_id]).copy_(part)


def _bytes(block: Tensor) -> Tensor:
    return block.view(-1).view(torch.uint8)
