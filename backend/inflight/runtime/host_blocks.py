"""Cold blocks of the KV cache in host memory: where their bytes lie, and the copies between them and the device.

For a GPU the memory is pinned, and the copies run in the order of its stream without anybody waiting. On a CPU the
blocks lie in a file without a name, which the system deletes with the process, however that ends; its pages are memory
only as long as nobody else needs it.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import ConfigurationError, InsufficientMemory
from inflight.runtime.block_bytes import BlockBytes
from inflight.runtime.device import free_memory, gib
from inflight.runtime.state_store import SPARE_CPU_BYTES, StateShape, StateStore

_ANY = 2**62
_PINNED_BYTES = 2**30
"""Of one region of pinned memory. torch rounds each up to a power of two, so a single one might take twice as much."""


def count_host_blocks(config: EngineConfig, shape: StateShape, groups: ParallelGroups, device: torch.device) -> int:
    """Number of host blocks of every rank. Collective. Raises ConfigurationError if not one fits, or if those of a GPU
    are more than this rank's share of the host's memory."""
    num_bytes = config.kv_cache_host_memory_bytes
    # Blocks take nothing in a rank whose layers all keep states of sequences: another one decides, if there is one.
    num_blocks = groups.all_reduce_min(num_bytes // shape.block_bytes if shape.block_bytes else _ANY)
    if num_blocks == _ANY:
        return 0
    if num_bytes and not num_blocks:
        raise ConfigurationError(
            f"kv_cache_host_memory_bytes {num_bytes} has no room for one block of {shape.block_bytes} bytes: "
            "raise it, or set it to 0"
        )
    available = free_memory(torch.device("cpu"), config.num_ranks) - SPARE_CPU_BYTES
    if device.type == "cuda" and num_bytes > available:
        raise InsufficientMemory(
            f"kv_cache_host_memory_bytes takes {gib(num_bytes)} of the host's memory for each rank, but only "
            f"{gib(max(available, 0))} are available to each; lower it or free memory"
        )
    return num_blocks


class HostBlocks:
    """`num_blocks` blocks, for the caches of one rank."""

    def __init__(self, store: StateStore, shape: StateShape, num_blocks: int, device: torch.device) -> None:
        """Raises InsufficientMemory if there is no room for them."""
        self.num_blocks = num_blocks
        self._bytes = BlockBytes(store)
        is_cuda = device.type == "cuda"
        self._has_bytes = shape.block_bytes > 0
        own_blocks = num_blocks if self._has_bytes else 0
        self._region_blocks = max(own_blocks, 1)
        if is_cuda and own_blocks:
            self._region_blocks = max(_PINNED_BYTES // shape.block_bytes, 1)
        allocate = _pinned_memory if is_cuda else _file_memory
        self._regions = [
            allocate(count * shape.block_bytes).view(count, shape.block_bytes)
            for first in range(0, own_blocks, self._region_blocks)
            for count in [min(self._region_blocks, own_blocks - first)]
        ]

    def offload(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (block, host block) pairs to the host. No host block is named twice."""
        for block_id, slot in pairs if self._has_bytes else ():
            self._bytes.read(block_id, self._slot(slot))

    def onboard(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host block, block) pairs to the device. No block is named twice."""
        for slot, block_id in pairs if self._has_bytes else ():
            self._bytes.write(self._slot(slot), block_id)

    def _slot(self, slot: int) -> Tensor:
        return self._regions[slot // self._region_blocks][slot % self._region_blocks]


def _pinned_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _file_memory(num_bytes: int) -> Tensor:
    """All its space is taken now: writing to a page for which the disk has none would kill the process."""
    try:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise InsufficientMemory(
            f"kv_cache_host_memory_bytes takes {gib(num_bytes)} in {tempfile.gettempdir()} for each rank, which has no "
            f"room for it ({error.strerror}); lower it, or let TMPDIR name another folder"
        ) from None
    return torch.frombuffer(memory, dtype=torch.uint8)
