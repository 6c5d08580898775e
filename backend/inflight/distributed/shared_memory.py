"""Memory of the leader's that the ranks of its machine have mapped.

It never has a name, so nothing stays behind whenever ranks are killed; the others open it as a file of the leader's
process, which the system allows to the same user only. Does not know what is kept in it.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from dataclasses import dataclass

from inflight.distributed.rank_group import RankGroup

logger = logging.getLogger(__name__)

PID = struct.Struct("=i")


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory of the leader's as one rank has mapped it."""

    memory: mmap.mmap | None
    """As many bytes as were asked for, and a few more; None where this rank cannot open it. Zeros at first."""
    pids: tuple[int, ...]
    """Process id of each rank, 0 of one that cannot open it; the same on all ranks."""

    @property
    def absent(self) -> list[int]:
        """The ranks that cannot open it."""
        return [rank for rank, pid in enumerate(self.pids) if not pid]


def share_memory(rank_group: RankGroup, num_bytes: int) -> SharedMemory:
    """Collective; all pass the same `num_bytes`.

    Behind these the memory has a place for each rank's process id, which the rank fills once it has mapped the memory:
    ranks cannot send anything to the leader otherwise.
    """
    total = num_bytes + rank_group.size * PID.size
    if rank_group.rank == 0:
        descriptor = os.memfd_create("inflight-ranks")
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, total)
        rank_group.broadcast(place_of(descriptor).encode())
    else:
        descriptor = open_place(rank_group.broadcast(None).decode())
    memory = mmap.mmap(descriptor, total) if descriptor >= 0 else None
    if memory is not None:
        PID.pack_into(memory, num_bytes + rank_group.rank * PID.size, os.getpid())
    rank_group.barrier()  # before the leader reads the ids, and closes what the others are to open
    if descriptor >= 0:
        os.close(descriptor)
    if rank_group.rank == 0:
        assert memory is not None
        rank_group.broadcast(found := memory[num_bytes:])
    else:
        found = rank_group.broadcast(None)
    return SharedMemory(memory, tuple(pid for (pid,) in PID.iter_unpack(found)))


def place_of(descriptor: int) -> str:
    """Where other processes of this user find this process's memory: device, inode number and path."""
    status = os.fstat(descriptor)
    return f"{status.st_dev} {status.st_ino} /proc/{os.getpid()}/fd/{descriptor}"


def open_place(place: str) -> int:
    """A descriptor of another process's memory; -1 if this process cannot open it.

    `place`: see place_of. In another PID namespace its path leads nowhere, or to a file of a process that has the same
    number there.
    """
    device, inode, path = place.split(" ", 2)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        logger.info("this rank cannot open memory of another process: %s", error)
        return -1
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (int(device), int(inode)):
        logger.info("this rank cannot open memory of another process: %s is another file here", path)
        os.close(descriptor)
        return -1
    return descriptor
