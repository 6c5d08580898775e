"""What all layers keep from step to step: blocks of tokens, slots of sequences, and how many of them fit. Knows no
sequence, and of a unit no more than its bytes.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import inflight_kernels
from inflight.available_memory import available_memory
from inflight.block_groups import BlockGroups
from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.errors import InsufficientMemory
from inflight.layers.state import LayerState, StateSpec, TensorSpec, Unit
from inflight.runtime.device import free_memory, gib, unused_of_share
from inflight.runtime.host_memory import occupy
from inflight.runtime.staging import to_host_tensor
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
MAX_GROUPS = 9
"""Of layers with blocks of their own: a step's tokens have a slot in each."""
SPARE_CPU_BYTES = 128 * 2**20
"""Host memory that must remain after the cache is allocated, for a step's own tensors and other threads."""


class BlockLayer(NamedTuple):
    """What decides where a layer's state of blocks is."""

    window: int
    kind: int
    """Equal for layers that keep the same tensors: these can take turns in a place."""
    num_bytes: int
    """Of a token."""


class Placing(NamedTuple):
    """Where a layer's state of blocks is: in which group of layers, and in which part of its blocks."""

    group: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What one rank keeps: its networks' `state_specs`, and the number of tokens of a block."""

    specs: tuple[StateSpec, ...]
    block_size: int
    windows: tuple[int, ...] = (0,)
    """Of groups of layers that have blocks of their own, see `find_windows`."""

    @property
    def groups(self) -> BlockGroups:
        return BlockGroups(self.block_size, self.windows)

    @property
    def blocks(self) -> tuple[StateSpec, ...]:
        """The specs of blocks that are no other layer's."""
        return tuple(spec for spec in self.specs if spec.unit is Unit.BLOCK and not spec.shared_back)

    @property
    def layers(self) -> list[BlockLayer]:
        """Of each of `blocks`."""
        kinds: dict[tuple[TensorSpec, ...], int] = {}
        return [
            BlockLayer(spec.window, kinds.setdefault(spec.tensors, len(kinds)), spec.num_bytes) for spec in self.blocks
        ]

    @property
    def placed(self) -> list[tuple[StateSpec, Placing]]:
        """`blocks`, and where each is."""
        return list(zip(self.blocks, place_layers(self.layers, self.groups), strict=True))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers of a group that have blocks; may be 0."""
        return self.block_size * _num_bytes(self.layers, self.groups)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a sequence's slot in all layers that have slots; 0 = none has."""
        return sum(spec.num_bytes for spec in self.specs if spec.unit is Unit.SEQUENCE)


def place_layers(layers: Sequence[BlockLayer], groups: BlockGroups) -> list[Placing]:
    """Where each of the layers is. Those of one kind with equal windows take turns in their groups, whose blocks have
    places for each kind."""
    found: list[Placing] = []
    places: dict[tuple[int, int], int] = {}
    counts: Counter[tuple[int, int]] = Counter()
    own_groups = {window: groups.of_window(window) for window in {layer.window for layer in layers}}
    for layer in layers:
        own = own_groups[layer.window]
        index, turn = divmod(counts[layer.kind, own[0]], len(own))
        counts[layer.kind, own[0]] += 1
        found.append(Placing(own[turn], places.setdefault((layer.kind, index), len(places))))
    return found


def _num_bytes(layers: Sequence[BlockLayer], groups: BlockGroups) -> int:
    """Of a token in all places of a block."""
    placings = place_layers(layers, groups)
    return sum({placing.place: layer.num_bytes for layer, placing in zip(layers, placings, strict=True)}.values())


def find_windows(stages: Sequence[Sequence[BlockLayer]], block_size: int, max_seq_len: int) -> tuple[int, ...]:
    """Of each group of layers with blocks of its own, such that the longest sequence takes least memory in the pipeline
    stage that has most; of equals, as few groups as possible. One group, of all layers, is (0,).

    A block has the same number of bytes in every group, so that some places in it may be of no use.
    """
    of_layers = sorted({layer.window for layers in stages for layer in layers})
    if not any(of_layers):
        return (0,)
    several = (combinations_with_replacement(of_layers, count) for count in range(1, MAX_GROUPS + 1))
    candidates = [BlockGroups(block_size, windows) for windows in chain.from_iterable(several)]

    def cost(groups: BlockGroups) -> tuple[int, int]:
        num_bytes = max(_num_bytes(layers, groups) for layers in stages)
        return groups.most_held_of_all(max_seq_len, 1) * num_bytes, len(groups)

    holds_all = (groups for groups in candidates if all(map(groups.of_window, of_layers)))
    return min(holds_all, key=cost).windows


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
    free_bytes = free_memory(device, config.num_ranks)
    if device.type == "cuda" and config.memory_share < 1:
        # Weights count, too: nobody knows which of the engines on this GPU loads first.
        free_bytes = min(free_bytes, unused_of_share(device, config.memory_share))
    free_bytes = max(free_bytes - reserved_bytes, 0)
    cache_bytes = _cache_bytes(device, fraction, free_bytes, config.memory_share)
    num_snapshots = _count_snapshots(config, shape, groups, cache_bytes)
    slot_bytes = num_slots(config, num_snapshots) * shape.slot_bytes
    if slot_bytes > cache_bytes and not tokens:
        raise InsufficientMemory(
            f"the states of max_batch_size {config.max_batch_size} sequences take {gib(slot_bytes)} of memory in each "
            f"rank, but there is room for {gib(cache_bytes)}; lower max_batch_size or num_state_snapshots, or raise "
            "kv_cache_free_gpu_mem_fraction"
        )
    if tokens:
        limits.append(tokens // shape.block_size * len(shape.windows))
    if tokens and not fraction and not config.spare_ranks:
        _check_room(tokens, shape, free_bytes - slot_bytes)
    if (fraction or not tokens) and shape.block_bytes:
        limits.append((cache_bytes - slot_bytes) // shape.block_bytes)
    if not limits or (device.type == "cpu" and not (tokens or fraction)):
        most_held = shape.groups.most_held_of_all(max_seq_len, config.max_num_tokens)
        limits.append(config.max_batch_size * most_held)
    num_blocks = groups.all_reduce_min(min(limits))
    if num_blocks < len(shape.windows):
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
    num_bytes = tokens // shape.block_size * len(shape.windows) * shape.block_bytes
    if num_bytes > free_bytes:
        raise InsufficientMemory(
            f"max_tokens_in_paged_kv_cache {tokens} takes {gib(num_bytes)} of memory in each rank, "
            f"but {gib(max(free_bytes, 0))} are free; lower it or free memory"
        )


def _cache_bytes(device: torch.device, fraction: float, free_bytes: int, share: float) -> int:
    """`share`: of a host's memory; that of a GPU's is in `free_bytes` already."""
    if device.type == "cuda":
        return int((fraction or DEFAULT_GPU_FRACTION) * free_bytes)
    if fraction:
        return int(share * fraction * free_bytes)
    return int(share * min(DEFAULT_CPU_FRACTION * free_bytes, MAX_DEFAULT_CPU_BYTES))


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
        self._device = device
        self.num_slots = num_slots if shape.slot_bytes else 0
        num_bytes = (num_blocks + 1) * shape.block_bytes + self.num_slots * shape.slot_bytes
        memory = _HostMemory(num_bytes, is_deferred=is_deferred) if device.type == "cpu" else None

        def zeros(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            # Attention multiplies masked values by 0, and 0 times a NaN that was left in memory is NaN.
            return memory.zeros(size, dtype) if memory else torch.zeros(size, dtype=dtype, device=device)

        num_units = {Unit.BLOCK: num_blocks + 1, Unit.SEQUENCE: self.num_slots}
        places: dict[int, LayerState] = {}
        placed = iter(shape.placed)
        self.states: list[LayerState] = []
        """As networks take them, in the order of the specs. Those at one place in different groups are the same."""
        self.slot_tensors: list[Tensor] = []
        for spec in shape.specs:
            if spec.shared_back:
                self.states.append(self.states[-spec.shared_back])
                continue
            if spec.unit is Unit.SEQUENCE:
                self.states.append(spec.allocate(num_units[spec.unit], shape.block_size, zeros))
                self.slot_tensors += self.states[-1].values()
                continue
            _, (group, place) = next(placed)
            if place not in places:
                places[place] = spec.allocate(num_units[spec.unit], shape.block_size, zeros)
            self.states.append(LayerState(places[place], group))
        self.block_tensors = [tensor for state in places.values() for tensor in state.values()]
        self.windows = shape.windows
        """See StateShape."""

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
        if not block_ids:
            return
        index = to_host_tensor(np.array(block_ids, dtype=np.int64), self._device).to(self._device, non_blocking=True)
        for tensor in self.block_tensors:
            if tensor.is_floating_point():
                # torch cannot index float8 tensors; the same bytes have other numbers.
                numbers = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
                numbers.index_copy_(0, index, _made_finite(numbers.index_select(0, index)))


def _made_finite(blocks: Tensor) -> Tensor:
    """In place. Bytes are those of float8_e4m3fn, which has no infinity and two NaNs, of either sign."""
    if blocks.dtype == torch.uint8:
        return blocks.masked_fill_((blocks & FP8_NAN) == FP8_NAN, 0)
    return blocks.nan_to_num_(0.0, 0.0, 0.0)


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
