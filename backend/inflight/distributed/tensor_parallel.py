"""Tensor collectives of the ranks over which every layer is split. Ranks connect through a RankGroup. Knows no request.

TensorParallelGroup               one rank: nothing to exchange
SharedMemoryTensorParallelGroup   CPU ranks of one host: C++ over memory that all ranks have mapped
TorchTensorParallelGroup          torch.distributed: NCCL for GPUs; gloo for CPU ranks of several hosts, or without a
                                  C++ compiler
"""

from __future__ import annotations

import logging
import mmap
import os

import torch
import torch.distributed as dist
from torch import Tensor

from inflight.distributed.mapping import Mapping
from inflight.distributed.rank_group import RankGroup
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
    """Over the memory of `_share_memory`. A rank that waits for a dead one sleeps until the launcher ends it."""

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
    """The part of this rank's group in memory of the leader's that every rank has mapped; None on all of them where the
    leader has no compiler, or where a rank cannot open the memory.

    It never has a name, so nothing stays behind whenever ranks are killed; the others open it as a file of the leader's
    process, which the system allows to the same user only. Behind the groups' parts it has one byte for each rank,
    which the rank sets once it has mapped the memory: ranks cannot send anything to the leader otherwise.
    """
    num_groups = mapping.size // mapping.tp
    if rank_group.rank == 0:
        try:
            library = load_collectives()
        except LibraryUnavailable as error:
            logger.warning("the ranks sum over sockets, many times slower than in shared memory: %s", error)
            rank_group.broadcast(b"")
            return None
        descriptor = os.memfd_create("inflight-ranks")
        os.fchmod(descriptor, 0o600)
        part_bytes = _part_bytes(segment_bytes(library, mapping.tp))
        os.ftruncate(descriptor, num_groups * part_bytes + mapping.size)
        status = os.fstat(descriptor)
        rank_group.broadcast(f"{status.st_dev} {status.st_ino} /proc/{os.getpid()}/fd/{descriptor}".encode())
    else:
        place = rank_group.broadcast(None).decode()
        if not place:
            return None
        library = load_collectives()  # which the leader has compiled
        part_bytes = _part_bytes(segment_bytes(library, mapping.tp))
        descriptor = _open_leaders_memory(place)
    group, rank = divmod(rank_group.rank, mapping.tp)
    memory = marks = None
    if descriptor >= 0:
        memory = mmap.mmap(descriptor, part_bytes, offset=group * part_bytes)
        marks = mmap.mmap(descriptor, mapping.size, offset=num_groups * part_bytes)
        marks[rank_group.rank] = 1
    rank_group.barrier()  # before the leader reads the bytes, and closes what the others are to open
    if descriptor >= 0:
        os.close(descriptor)
    if rank_group.rank == 0:
        assert marks is not None
        absent = [other for other in range(mapping.size) if not marks[other]]
        if absent:
            logger.warning(
                "the ranks sum through sockets, which takes many times as long: ranks %s cannot open the memory of "
                "rank 0; start all ranks of this machine in one PID namespace (one container)",
                ", ".join(map(str, absent)),
            )
        rank_group.broadcast(b"" if absent else b"all")
        all_mapped = not absent
    else:
        all_mapped = rank_group.broadcast(None) != b""
    if not all_mapped or memory is None:
        return None
    return SharedMemoryCollectives(library, memory, rank, mapping.tp)


def _part_bytes(num_bytes: int) -> int:
    """Rounded up to where memory can be mapped from."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _open_leaders_memory(place: str) -> int:
    """A descriptor of the leader's memory; -1, with a warning, if this process cannot open it.

    `place`: device and inode number of the memory, and its path. In another PID namespace the path leads nowhere, or to
    a file of a process that has the same number there.
    """
    device, inode, path = place.split(" ", 2)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("this rank cannot open the memory of rank 0: %s", error)
        return -1
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (int(device), int(inode)):
        logger.warning("this rank cannot open the memory of rank 0: %s is another file here", path)
        os.close(descriptor)
        return -1
    return descriptor
