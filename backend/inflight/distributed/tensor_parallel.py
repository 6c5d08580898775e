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
import shutil
import socket
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from inflight.distributed.mapping import Mapping
from inflight.distributed.rank_group import RankGroup
from inflight_kernels.cpu import (
    LibraryUnavailable,
    SharedMemoryCollectives,
    load_collectives,
    segment_bytes,
)

logger = logging.getLogger(__name__)

# all_gather_into_tensor is deprecated from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Long, because ranks load their libraries at different speeds. The executor notices a rank that died, not this."""


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
        # A second group needs a rendezvous of its own; EngineConfig refuses what would make one.
        assert mapping.tensor_parallel_ranks(rank_group.rank) == tuple(range(rank_group.size))
        if device.type == "cpu" and not rank_group.several_hosts:
            collectives = _share_memory(rank_group)
            if collectives is not None:
                return SharedMemoryTensorParallelGroup(rank_group, collectives)
        return TorchTensorParallelGroup(rank_group, device)

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

    def __init__(self, rank_group: RankGroup, collectives: SharedMemoryCollectives) -> None:
        self.rank = rank_group.rank
        self.size = rank_group.size
        self._collectives = collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._collectives.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._collectives.all_gather(x)

    def all_reduce_min(self, value: int) -> int:
        return int(self._collectives.all_gather(torch.tensor([value])).min().item())


class TorchTensorParallelGroup(TensorParallelGroup):
    """Over torch.distributed's default group. Ranks of one host find each other by a file in a private folder and
    communicate over loopback."""

    def __init__(self, rank_group: RankGroup, device: torch.device) -> None:
        self.rank = rank_group.rank
        self.size = rank_group.size
        self._device = device
        folder = ""
        if rank_group.several_hosts:
            store = _tcp_store(rank_group)
        else:
            # gloo would listen on the address of the host's name, which may be a public one.
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            folder, store = _file_store(rank_group)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=RENDEZVOUS_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        # After this, all connections are established and the folder is no longer needed.
        self.all_reduce_min(0)
        if self.rank == 0 and folder:
            shutil.rmtree(folder, ignore_errors=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather(gathered, x.contiguous())
        return gathered.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def all_reduce_min(self, value: int) -> int:
        smallest = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest.item())

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _share_memory(rank_group: RankGroup) -> SharedMemoryCollectives | None:
    """Memory of the leader's that every rank has mapped; None on all of them where the leader has no compiler, or where
    a rank cannot open the memory.

    It never has a name, so nothing stays behind whenever ranks are killed; the others open it as a file of the leader's
    process, which the system allows to the same user only. Behind what the collectives need it has one byte for each
    rank, which the rank sets once it has mapped the memory: ranks cannot send anything to the leader otherwise.
    """
    if rank_group.rank == 0:
        try:
            library = load_collectives()
        except LibraryUnavailable as error:
            logger.warning("the ranks sum over sockets, many times slower than in shared memory: %s", error)
            rank_group.broadcast(b"")
            return None
        descriptor = os.memfd_create("inflight-ranks")
        os.fchmod(descriptor, 0o600)
        num_bytes = segment_bytes(library, rank_group.size)
        os.ftruncate(descriptor, num_bytes + rank_group.size)
        status = os.fstat(descriptor)
        rank_group.broadcast(f"{status.st_dev} {status.st_ino} /proc/{os.getpid()}/fd/{descriptor}".encode())
    else:
        place = rank_group.broadcast(None).decode()
        if not place:
            return None
        library = load_collectives()  # which the leader has compiled
        num_bytes = segment_bytes(library, rank_group.size)
        descriptor = _open_leaders_memory(place)
    memory = mmap.mmap(descriptor, num_bytes + rank_group.size) if descriptor >= 0 else None
    if memory is not None:
        memory[num_bytes + rank_group.rank] = 1
    rank_group.barrier()  # before the leader reads the bytes, and closes what the others are to open
    if descriptor >= 0:
        os.close(descriptor)
    if rank_group.rank == 0:
        assert memory is not None
        absent = [rank for rank in range(rank_group.size) if not memory[num_bytes + rank]]
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
    return SharedMemoryCollectives(library, memory, rank_group.rank, rank_group.size)


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


def _file_store(rank_group: RankGroup) -> tuple[str, Store]:
    """A store in a folder that only this user can enter (mkdtemp makes it 0700)."""
    folder = tempfile.mkdtemp(prefix="inflight-ranks-") if rank_group.rank == 0 else ""
    folder = rank_group.broadcast(folder.encode() if rank_group.rank == 0 else None).decode()
    return folder, FileStore(os.path.join(folder, "store"), rank_group.size)


def _tcp_store(rank_group: RankGroup) -> Store:
    """A store that the leader serves at a free port of its host's own address only."""
    if rank_group.rank == 0:
        host = socket.gethostname()
        listener = socket.create_server((host, 0))
        port = int(listener.getsockname()[1])
        rank_group.broadcast(f"{host}:{port}".encode())
        return TCPStore(
            host,
            port,
            rank_group.size,
            is_master=True,
            wait_for_workers=False,
            timeout=RENDEZVOUS_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
    host, _, port_text = rank_group.broadcast(None).decode().rpartition(":")
    return TCPStore(host, int(port_text), rank_group.size, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
