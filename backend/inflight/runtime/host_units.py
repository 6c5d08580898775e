"""Cold blocks and states of sequences in host memory: where their bytes lie, and the copies to the device and back.

For a GPU the memory is pinned, and the copies run in the order of its stream without anybody waiting. On a CPU they lie
in a file without a name, which the system deletes with the process, however that ends; its pages are memory
only as long as nobody else needs it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import ConfigurationError, InsufficientMemory
from inflight.runtime.device import free_memory, gib
from inflight.runtime.state_store import SPARE_CPU_BYTES, StateShape, Units
from inflight.runtime.unit_bytes import UnitBytes

_ANY = 2**62
_PINNED_BYTES = 2**30
"""Of one region of pinned memory. torch rounds each up to a power of two, so a single one might take twice as much."""


class HostCounts(NamedTuple):
    num_blocks: int
    num_snapshots: int
    """Of the states of sequences."""


NOTHING_ON_HOST = HostCounts(0, 0)


def count_host_units(
    config: EngineConfig, shape: StateShape, units: Units, groups: ParallelGroups, device: torch.device
) -> HostCounts:
    """Numbers of blocks and of snapshots in the host memory of every rank, which is split between them as the cache on
    the device is. Collective. Raises ConfigurationError if not one of each fits, or if those of a GPU are more than
    this rank's share of the host's memory."""
    num_bytes = config.kv_cache_host_memory_bytes
    if not num_bytes:
        return NOTHING_ON_HOST
    num_snapshots = units.num_snapshots or 0
    own_bytes = units.num_blocks * shape.block_bytes + num_snapshots * shape.slot_bytes
    # What keeps nothing in this rank takes nothing: another one decides, if there is one.
    counts = [
        groups.all_reduce_min(count * num_bytes // own_bytes if own_bytes else _ANY)
        for count in (units.num_blocks, num_snapshots)
    ]
    if _ANY in counts:
        return NOTHING_ON_HOST
    found = HostCounts(*counts)
    if not found.num_blocks or (num_snapshots and not found.num_snapshots):
        state = f" and one state of {shape.slot_bytes} bytes, of which there are {num_snapshots} on the device beside "
        state += f"{units.num_blocks} blocks"
        raise ConfigurationError(
            f"kv_cache_host_memory_bytes {num_bytes} has no room for one block of {shape.block_bytes} bytes"
            f"{state if num_snapshots else ''}: raise it, or set it to 0"
        )
    available = free_memory(torch.device("cpu"), config.num_ranks) - SPARE_CPU_BYTES
    if device.type == "cuda" and num_bytes > available:
        raise InsufficientMemory(
            f"kv_cache_host_memory_bytes takes {gib(num_bytes)} of the host's memory for each rank, but only "
            f"{gib(max(available, 0))} are available to each; lower it or free memory"
        )
    return found


class HostUnits:
    """`num_units` blocks or slots, for the store of one rank."""

    def __init__(self, tensors: list[Tensor], num_units: int, device: torch.device) -> None:
        """`tensors`: see UnitBytes. Raises InsufficientMemory if there is no room for them."""
        self.num_units = num_units
        self._bytes = UnitBytes(tensors)
        unit_bytes = self._bytes.num_bytes
        is_cuda = device.type == "cuda"
        own_units = num_units if unit_bytes else 0
        self._region_units = max(own_units, 1)
        if is_cuda and own_units:
            self._region_units = max(_PINNED_BYTES // unit_bytes, 1)
        allocate = _pinned_memory if is_cuda else _file_memory
        self._regions = [
            allocate(count * unit_bytes).view(count, unit_bytes)
            for first in range(0, own_units, self._region_units)
            for count in [min(self._region_units, own_units - first)]
        ]

    def offload(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (unit, place) pairs to the host. No place is named twice."""
        for unit, place in pairs if self._regions else ():
            self._bytes.read(unit, self._place(place))

    def onboard(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (place, unit) pairs to the device. No unit is named twice."""
        for place, unit in pairs if self._regions else ():
            self._bytes.write(self._place(place), unit)

    def _place(self, place: int) -> Tensor:
        return self._regions[place // self._region_units][place % self._region_units]


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
