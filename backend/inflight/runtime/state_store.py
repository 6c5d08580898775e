"""What all layers keep from step to step: blocks of tokens, slots of sequences, and how many of them fit. Knows no
sequence, and of a unit no more than its bytes.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import inflight_kernels
from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import InsufficientMemory
from inflight.layers.state import StateSpec, Unit
from inflight.runtime.device import free_memory, gib
from inflight.runtime.host_memory import available_memory, occupy
from inflight_kernels.cpu import HugePageArena

MAX_DEFAULT_CPU_BYTES = 4 * 2**30
DEFAULT_CPU_FRACTION = 0.2
DEFAULT_GPU_FRACTION = 0.9
FP8_NAN = 0x7F
"""The bits of NaN in float8_e4m3fn, but for the sign."""
SNAPSHOT_FRACTION = 0.25
"""Of the cache's memory, at most, for snapshots of sequences' states if their number is not configured."""
SNAPSHOTS_PER_ROW = 4
"""Likewise."""
SPARE_CPU_BYTES = 128 * 2**20
"""Host memory that must remain after the cache is allocated, for a step's own tensors and other threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What one rank keeps: its networks' `state_specs`, and the number of tokens of a block."""

    specs: tuple[StateSpec, ...]
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers that have blocks; may be 0."""
        return self.block_size * sum(spec.num_bytes for spec in self.specs if spec.unit is Unit.BLOCK)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's slot in all layers that have slots; 0 = none has."""
        return sum(spec.num_bytes for spec in self.specs if spec.unit is Unit.SEQUENCE)


class Units(NamedTuple):
    num_blocks: int
    num_snapshots: int | None
    """Slots for states of sequences besides those of rows; None = no network keeps such a state."""


def count_units(
    config: EngineConfig,
    shape: StateShape,
    groups: ParallelGroups,
    device: torch.device,
    reserved_bytes: int,
    max_seq_len: int,
) -> Units:
    """Numbers of blocks and of snapshots that every rank can hold: by tokens, by a fraction of free memory, or the
    smaller of both. Collective.

    `reserved_bytes`: memory of a step, subtracted from the free memory first. `max_seq_len`: without a configured size,
    the cache of a CPU is not larger than `max_batch_size` sequences of this length need, because it is allocated at the
    start. Raises InsufficientMemory if there is no room; with spare ranks, `StateStore.occupy` does.
    """
    limits: list[int] = []
    tokens, fraction = config.max_tokens_in_paged_kv_cache, config.kv_cache_free_gpu_mem_fraction
    free_bytes = max(free_memory(device, config.num_ranks) - reserved_bytes, 0)
    cache_bytes = _cache_bytes(device, fraction, free_bytes)
    num_snapshots = _count_snapshots(config, shape, groups, cache_bytes)
    slot_bytes = num_slots(config, num_snapshots) * shape.slot_bytes
    if slot_bytes > cache_bytes and not tokens:
        raise InsufficientMemory(
            f"the states of max_batch_size {config.max_batch_size} sequences take {gib(slot_bytes)} of memory in each "
            f"rank, but there is room for {gib(cache_bytes)}; lower max_batch_size or num_state_snapshots, or raise "
            "kv_cache_free_gpu_mem_fraction"
        )
    if tokens:
        limits.append(tokens // shape.block_size)
    if tokens and not fraction and not config.spare_ranks:
        _check_room(tokens, shape, free_bytes - slot_bytes)
    if (fraction or not tokens) and shape.block_bytes:
        limits.append((cache_bytes - slot_bytes) // shape.block_bytes)
    if not limits or (device.type == "cpu" and not (tokens or fraction)):
        limits.append(config.max_batch_size * -(-max_seq_len // shape.block_size))
    num_blocks = groups.all_reduce_min(min(limits))
    if num_blocks < 1:
        raise InsufficientMemory(
            f"there is no room for the KV cache: a block of {shape.block_size} tokens takes {shape.block_bytes} bytes; "
            "raise max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction, "
            "lower tokens_per_block, or free memory"
        )
    return Units(num_blocks, num_snapshots)


def _count_snapshots(config: EngineConfig, shape: StateShape, groups: ParallelGroups, cache_bytes: int) -> int | None:
    """Of sequences' states, besides those of rows; None if no rank keeps any. Collective."""
    if not groups.all_reduce_min(-int(shape.slot_bytes > 0)):
        return None
    most = config.num_state_snapshots or SNAPSHOTS_PER_ROW * config.max_batch_size
    if shape.slot_bytes and not config.num_state_snapshots:
        most = min(most, int(SNAPSHOT_FRACTION * cache_bytes) // shape.slot_bytes)
    return groups.all_reduce_min(most)


def num_slots(config: EngineConfig, num_snapshots: int | None) -> int:
    """One for each row, one for padding, and those of snapshots."""
    return 0 if num_snapshots is None else config.max_batch_size + 1 + num_snapshots


def _check_room(tokens: int, shape: StateShape, free_bytes: int) -> None:
    num_bytes = tokens // shape.block_size * shape.block_bytes
    if num_bytes > free_bytes:
        raise InsufficientMemory(
            f"max_tokens_in_paged_kv_cache {tokens} takes {gib(num_bytes)} of memory in each rank, "
            f"but {gib(max(free_bytes, 0))} are free; lower it or free memory"
        )


def _cache_bytes(device: torch.device, fraction: float, free_bytes: int) -> int:
    if fraction:
        return int(fraction * free_bytes)
    if device.type == "cuda":
        return int(DEFAULT_GPU_FRACTION * free_bytes)
    return min(int(DEFAULT_CPU_FRACTION * free_bytes), MAX_DEFAULT_CPU_BYTES)


class StateStore:
    """The tensors of `num_blocks` blocks for sequences and of one more that is never written, `filler_block`; and of
    `num_slots` slots, see the function of this name."""

    def __init__(
        self, shape: StateShape, num_blocks: int, device: torch.device, num_slots: int = 0, *, is_deferred: bool = False
    ) -> None:
        """`is_deferred`: on a CPU most of the memory is taken by `occupy`. Raises InsufficientMemory if the host lacks
        the memory that is taken now."""
        self.num_blocks = num_blocks
        self.filler_block = num_blocks
        self.num_slots = num_slots if shape.slot_bytes else 0
        num_bytes = (num_blocks + 1) * shape.block_bytes + self.num_slots * shape.slot_bytes
        memory = _HostMemory(num_bytes, is_deferred=is_deferred) if device.type == "cpu" else None

        def zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            # Attention multiplies masked values by 0, and 0 times a NaN that was left in memory is NaN.
            return memory.zeros(size, dtype) if memory else torch.zeros(size, dtype=dtype, device=device)

        num_units = {Unit.BLOCK: num_blocks + 1, Unit.SEQUENCE: self.num_slots}
        self.states = [spec.allocate(num_units[spec.unit], shape.block_size, zeros) for spec in shape.specs]
        """As networks take them, in the order of the specs."""
        self.block_tensors, self.slot_tensors = (
            [
                t
                for spec, state in zip(shape.specs, self.states, strict=True)
                if spec.unit is unit
                for t in state.values()
            ]
            for unit in (Unit.BLOCK, Unit.SEQUENCE)
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in [*self.block_tensors, *self.slot_tensors])

    def occupy(self) -> None:
        """Begin to take the memory of a deferred store, beside the steps that use it. Raises InsufficientMemory."""
        _check_available(self.num_bytes, self.num_bytes)
        tensors = [*self.block_tensors, *self.slot_tensors]
        threading.Thread(target=occupy, args=(tensors,), name="inflight-kv-memory", daemon=True).start()

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy whole blocks in every layer; see `inflight_kernels.copy_blocks`. Both int64 (pairs,)."""
        if self.block_tensors:
            inflight_kernels.copy_blocks(self.block_tensors, sources.contiguous(), destinations.contiguous())

    def copy_slots(self, sources: Tensor, destinations: Tensor) -> None:
        """The same for slots. A pipeline stage may have none, where others have some."""
        if self.slot_tensors:
            inflight_kernels.copy_blocks(self.slot_tensors, sources.contiguous(), destinations.contiguous())

    def scrub(self, block_ids: list[int]) -> None:
        """Replace NaN and infinity by 0 before other sequences get the blocks. Finite values may be shared and stay.
        Slots need none of this: a sequence that begins reads nothing of its slot."""
        for tensor in self.block_tensors if block_ids else ():
            for block_id in block_ids:
                _make_finite(tensor[block_id])


def _make_finite(block: Tensor) -> None:
    """In place. float8_e4m3fn, for which torch has no operation, has no infinity and two NaNs, of either sign; whole
    numbers have neither."""
    if block.dtype == torch.float8_e4m3fn:
        bits = block.view(torch.uint8)
        bits.masked_fill_((bits & FP8_NAN) == FP8_NAN, 0)
    elif block.is_floating_point():
        block.nan_to_num_(0.0, 0.0, 0.0)


class _HostMemory:
    """Memory of a cache in huge pages, all allocated at the start. If pages were allocated when requests first write to
    them, the system might run out of memory then and kill the rank.

    4 GiB take 1.3 to 1.5 s (two threads on two cores of Zen 5, 2026-11-22). Spare ranks have none until they serve:
    their cache would lie idle beside the one in use, which is gone when they take over.
    """

    def __init__(self, num_bytes: int, *, is_deferred: bool) -> None:
        self._arena = HugePageArena()
        self._num_bytes = self._left = num_bytes
        self._is_deferred = is_deferred

    def zeros(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, written by all threads unless that is deferred. Raises InsufficientMemory if the rest of
        the cache, this tensor included, does not fit into the available memory."""
        num_elements = math.prod(size)
        if self._is_deferred:
            return self._arena.take(num_elements, dtype).view(size)
        _check_available(self._num_bytes, self._left)
        self._left -= num_elements * dtype.itemsize
        return self._arena.take(num_elements, dtype).zero_().view(size)


def _check_available(num_bytes: int, left: int) -> None:
    """Raise InsufficientMemory if the bytes that are `left` to take, of those of a whole cache, are not available."""
    available = available_memory() - SPARE_CPU_BYTES
    if left > available:
        raise InsufficientMemory(
            f"the KV cache takes {gib(num_bytes)}; {gib(left)} of it are not allocated yet, but only "
            f"{gib(max(available, 0))} of memory are available; lower max_tokens_in_paged_kv_cache or "
            "kv_cache_free_gpu_mem_fraction, or free memory"
        )
