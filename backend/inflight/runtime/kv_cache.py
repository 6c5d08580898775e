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
from inflight.layers.attention import CacheSpec, LayerCache
from inflight.runtime.device import free_memory, gib

MAX_DEFAULT_CPU_BYTES = 4 * 2**30
DEFAULT_CPU_FRACTION = 0.2
DEFAULT_GPU_FRACTION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """What one rank keeps for each token: its network's `cache_specs`, in blocks of `block_size` tokens."""

    layers: tuple[CacheSpec, ...]
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Of all layers, keys and values."""
        token_bytes = sum(2 * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize for spec in self.layers)
        return self.block_size * token_bytes


def count_blocks(
    config: EngineConfig, shape: KVCacheShape, group: TensorParallelGroup, device: torch.device, reserved_bytes: int
) -> int:
    """Blocks that every rank can hold: by tokens, by a fraction of free memory, or the smaller of both. Collective.

    `reserved_bytes`: what a step needs besides, taken off the free memory first.
    """
    limits: list[int] = []
    tokens, fraction = config.max_tokens_in_paged_kv_cache, config.kv_cache_free_gpu_mem_fraction
    free_bytes = max(free_memory(device, group.size) - reserved_bytes, 0)
    if tokens:
        limits.append(tokens // shape.block_size)
    if tokens and not fraction:
        _check_room(tokens, shape, free_bytes)
    if fraction or not tokens:
        limits.append(_cache_bytes(device, fraction, free_bytes) // shape.block_bytes)
    num_blocks = group.all_reduce_min(min(limits))
    if num_blocks < 1:
        raise ConfigurationError(
            f"there is no room for the KV cache: a block of {shape.block_size} tokens takes {shape.block_bytes} bytes; "
            "raise max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction, "
            "lower tokens_per_block, or free memory"
        )
    return num_blocks


def _check_room(tokens: int, shape: KVCacheShape, free_bytes: int) -> None:
    num_bytes = tokens // shape.block_size * shape.block_bytes
    if num_bytes > free_bytes:
        raise ConfigurationError(
            f"max_tokens_in_paged_kv_cache {tokens} takes {gib(num_bytes)} of memory in each rank, "
            f"but {gib(free_bytes)} are free; lower it or free memory"
        )


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
        # Zeros, because attention multiplies what it masks by 0, and 0 times leftover NaN is NaN.
        self.layers = [
            LayerCache(keys=_zeros(size, spec.dtype, device), values=_zeros(size, spec.dtype, device))
            for spec in shape.layers
            for size in [(num_blocks + 1, shape.block_size, spec.num_kv_heads, spec.head_dim)]
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
