"""Tensor collectives of the ranks over which every layer is split. Ranks connect through a RankGroup. Knows no request.

TensorParallelGroup               one rank: nothing to exchange
SharedMemoryTensorParallelGroup   CPU ranks of one host: C++ over memory that all ranks have mapped
TorchTensorParallelGroup          torch.distributed: NCCL for GPUs; gloo for CPU ranks of several hosts, or without
                                  C++
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from inflight.distributed.mapping import Mapping
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.shared_memory import share_memory
from inflight.distributed.torch_groups import TorchGroups
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
    can_be_recorded = True
    """Its sums can become operations of a program in C++ (inflight_kernels.cpu)."""

    @staticmethod
    def create(
        rank_group: RankGroup,
        mapping: Mapping,
        device: torch.device,
        torch_groups: TorchGroups,
        *,
        sums_in_order: bool = False,
    ) -> TensorParallelGroup:
        """Connect the ranks that split layers with this one; `device` is this rank's own. Collective over `rank_group`,
        whose world ranks `mapping` describes. `torch_groups`: of the same ranks; joined if they sum through torch.
        `sums_in_order`: the order in which the ranks' parts of an element are added up does not depend on the tensor's
        size or on the element's place in it; in shared memory it never does."""
        assert rank_group.size == mapping.size
        if mapping.tp == 1:
            return TensorParallelGroup()
        if device.type == "cpu" and not rank_group.several_hosts:
            collectives = _share_memory(rank_group, mapping)
            if collectives is not None:
                return SharedMemoryTensorParallelGroup(rank_group.rank % mapping.tp, mapping.tp, collectives)
        group = torch_groups.join()
        return TorchTensorParallelGroup(rank_group.rank, mapping, device, group, sums_in_order=sums_in_order)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of every rank's `x`, equal on all of them; may overwrite `x`."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` (..., n) side by side in the last dimension: (..., n * size), in rank order."""
        return x

    def all_reduce_min(self, value: int) -> int:
        """The smallest of every rank's `value`. Waits for the device."""
        return value


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

    can_be_recorded = False

    def __init__(
        self,
        rank: int,
        mapping: Mapping,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        sums_in_order: bool,
    ) -> None:
        """`rank`: the world rank. `group`: see TorchGroups.join."""
        self._group = group
        self._sums_in_order = sums_in_order
        self.rank = mapping.tensor_parallel_ranks(rank).index(rank)
        self.size = mapping.tp
        self._device = device

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._sums_in_order:
            dist.all_reduce(x, group=self._group)
            return x
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in self._parts(x):
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._parts(x).movedim(0, -2).flatten(-2)

    def _parts(self, x: Tensor) -> Tensor:
        """Every rank's `x` (n, ...) in rank order: (size, n, ...)."""
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous(), group=self._group)
        return gathered.view(self.size, *x.shape)

    def all_reduce_min(self, value: int) -> int:
        smallest = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._group)
        return int(smallest.item())


def _share_memory(rank_group: RankGroup, mapping: Mapping) -> SharedMemoryCollectives | None:
    """Collectives of this rank's group, over its part of memory that every rank has mapped; None on all of them where
    the leader has no library, or where a rank cannot open the memory."""
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
        library = load_collectives()  # which the leader has found or compiled
    num_bytes = segment_bytes(library, mapping.tp)
    shared = share_memory(rank_group, mapping.size // mapping.tp * num_bytes)
    if shared.absent and rank_group.rank == 0:
        logger.warning(
            "the ranks sum through sockets, which takes many times as long: ranks %s cannot open the memory of "
            "rank 0; start all ranks of this machine in one PID namespace (one container)",
            ", ".join(map(str, shared.absent)),
        )
    if shared.absent or shared.memory is None:
        return None
    group, rank = divmod(rank_group.rank, mapping.tp)
    return SharedMemoryCollectives(library, shared.memory, rank, mapping.tp, group * num_bytes)
