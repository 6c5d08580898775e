"""Tensor collectives of the ranks over which every layer is split. Ranks connect through a RankGroup. Knows no request.

TensorParallelGroup               one rank: nothing to exchange
SharedMemoryTensorParallelGroup   CPU ranks of one host: C++ over memory that all ranks have mapped
TorchTensorParallelGroup          torch.distributed: NCCL for GPUs; gloo for CPU ranks of several hosts, or without a
                                  C++ compiler
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from inflight.distributed.mapping import Mapping
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.shared_memory import share_memory
from inflight.distributed.torch_group import join_torch
from inflight_kernels.cpu import (
    LibraryUnavailable,
    SharedMemoryCollectives,
    load_collectives,
    segment_bytes,
)

logger = logging.getLogger(__name__)

# all_gather_into_tensor is deprecated from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TensorParallelGroup:
    """A group of one. Calls are collective: every rank makes them in the same order."""

    rank = 0
    """This rank's number within the group."""
    size = 1

    @staticmethod
    def create(rank_group: RankGroup, mapping: Mapping, device: torch.device) -> TensorParallelGroup:
        """Connect the ranks that split layers with this one; `device` is this rank's own. Collective over `rank_group`,
        whose world ranks `mapping` describes."""
        assert rank_group.size == mapping.size
        if mapping.tp == 1:
            return TensorParallelGroup()
        if device.type == "cpu" and not rank_group.several_hosts:
            collectives = _share_memory(rank_group, mapping)
            if collectives is not None:
                return SharedMemoryTensorParallelGroup(rank_group.rank % mapping.tp, mapping.tp, collectives)
        return TorchTensorParallelGroup(rank_group, mapping, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of every rank's `x`, equal on all of them; may overwrite `x`."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` (..., n) side by side in the last dimension: (..., n * size), in rank order."""
        return x

    def all_reduce_min(self, value: int) -> int:
        """The smallest of every rank's `value`. Waits for the device."""
        return value

    def close(self) -> None:
        """Leave the group."""


class SharedMemoryTensorParallelGroup(TensorParallelGroup):
    """Over memory that all ranks have mapped. A rank that waits for a dead one sleeps until the launcher ends it."""

    def __init__(self, rank: int, size: int, collectives: SharedMemoryCollectives) -> None:
        self.rank = rank
        self.size = size
        self._collectives = collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._collectives.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._collectives.all_gather(x)

    def all_reduce_min(self, value: int) -> int:
        return int(self._collectives.all_gather(torch.tensor([value])).min().item())


class TorchTensorParallelGroup(TensorParallelGroup):
    """Over torch.distributed: its default group or, where there are several, a part of that."""

    def __init__(self, rank_group: RankGroup, mapping: Mapping, device: torch.device) -> None:
        join_torch(rank_group, device)
        ranks = mapping.tensor_parallel_ranks(rank_group.rank)
        self.rank = ranks.index(rank_group.rank)
        self.size = mapping.tp
        self._device = device
        self._group: dist.ProcessGroup | None = None
        if mapping.size > mapping.tp:
            # Each group is made by all ranks, members or not.
            groups = [dist.new_group(range(first, first + mapping.tp)) for first in range(0, mapping.size, mapping.tp)]
            self._group = groups[ranks[0] // mapping.tp]
            self.all_reduce_min(0)  # connects its ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous(), group=self._group)
        return gathered.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def all_reduce_min(self, value: int) -> int:
        smallest = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group)
        return int(smallest.item())

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _share_memory(rank_group: RankGroup, mapping: Mapping) -> SharedMemoryCollectives | None:
    """Collectives over memory that every rank has mapped, each group's another; None on all of them where the leader
    has no compiler, or where a rank cannot open the memory."""
    if rank_group.rank == 0:
        try:
            library = load_collectives()
        except LibraryUnavailable as error:
            logger.warning("the ranks sum over sockets, many times slower than in shared memory: %s", error)
            rank_group.broadcast(b"")
            return None
        rank_group.broadcast(b"compiled")
    else:
        if not rank_group.broadcast(None):
            return None
        library = load_collectives()  # which the leader has compiled
    own, rank = divmod(rank_group.rank, mapping.tp)
    num_bytes = segment_bytes(library, mapping.tp)
    shared = [share_memory(rank_group, num_bytes) for _ in range(mapping.size // mapping.tp)][own]
    if shared.absent and rank_group.rank == 0:
        logger.warning(
            "the ranks sum through sockets, which takes many times as long: ranks %s cannot open the memory of "
            "rank 0; start all ranks of this machine in one PID namespace (one container)",
            ", ".join(map(str, shared.absent)),
        )
    if shared.absent or shared.memory is None:
        return None
    return SharedMemoryCollectives(library, shared.memory, rank, mapping.tp)
