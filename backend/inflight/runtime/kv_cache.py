"""Keys and values of all layers in blocks, and how many blocks fit. Knows no sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import inflight_kernels
from inflight.config import EngineConfig
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.attention import LayerCache
from inflight.runtime.device import free_memory

MAX_DEFAULT_CPU_BYTES = 4 * 2**30
DEFAULT_CPU_FRACTION = 0.2
DEFAULT_GPU_FRACTION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """What one rank keeps for each token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Of all layers, keys and values."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize


def count_blocks(
    config: EngineConfig, shape: KVCacheShape, group: TensorParallelGroup, device: torch.device, reserved_bytes: int
) -> int:
    """Blocks that every rank can hold: by tokens, by a fraction of free memory, or the smaller of both. Collective.

    `reserved_bytes`: what a step needs besides, taken off the free memory first.
    """
    limits: list[int] = []
    tokens, fraction = config.max_tokens_in_paged_kv_cache, config.kv_cache_free_gpu_mem_fraction
    if tokens:
        limits.append(tokens // shape.block_size)
    if fraction or not tokens:
        free_bytes = max(free_memory(device, group.size) - reserved_bytes, 0)
        limits.append(_cache_bytes(device, fraction, free_bytes) // shape.block_bytes)
    num_blocks = group.all_reduce_min(min(limits))
    if num_blocks < 1:
        raise ConfigurationError(
            f"there is no room for the KV cache: a block of {shape.block_size} tokens takes {shape.block_bytes} bytes; "
            "raise max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction, or free memory"
        )
    return num_blocks


def _cache_bytes(device: torch.device, fraction: float, free_bytes: int) -> int:
    if fraction:
        return int(fraction * free_bytes)
    if device.type == "cuda":
        return int(DEFAULT_GPU_FRACTION * free_bytes)
    return min(int(DEFAULT_CPU_FRACTION * free_bytes), MAX_DEFAULT_CPU_BYTES)


class KVCache:
    """`num_blocks` blocks that sequences may own, and one more that nobody writes: `filler_block`."""

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.filler_block = num_blocks
        size = (num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, because attention multiplies what it masks by 0, and 0 times leftover NaN is NaN.
        self.layers = [
            LayerCache(keys=_zeros(size, shape.dtype, device), values=_zeros(size, shape.dtype, device))
            for _ in range(shape.num_layers)
        ]

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks in every layer; see `inflight_kernels.copy_blocks`. Both int64 (pairs,)."""
        keys, values = [layer.keys for layer in self.layers], [layer.values for layer in self.layers]
        inflight_kernels.copy_blocks(keys, values, sources, destinations)

    def scrub(self, block_ids: list[int]) -> None:
        """Put 0 for what is not finite, before another sequence takes the blocks over. The rest may be shared."""
        for layer in self.layers:
            for block_id in block_ids:
                layer.keys[block_id].nan_to_num_(0.0, 0.0, 0.0)
                layer.values[block_id].nan_to_num_(0.0, 0.0, 0.0)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy's zeros are pages that the system gives when they are first touched; torch's would all be written now.
    return torch.from_numpy(np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)
