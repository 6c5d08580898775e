"""A RankGroup over MPI. Only buffers travel: nothing that a rank receives is ever unpickled.

A wait inside MPI would spin on a whole core. So the leader rings a bell for each operation that it has begun, and a
rank on its machine sleeps until then: for microseconds while steps run, for hours in an idle engine. What is left, a
reply or a relay, ranks wait for by asking again and again, with naps between that grow; so do ranks of other machines
from the first. Never by spinning: in each rank the step that runs needs the core and Python's lock.
To be used from one thread only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
from numpy.typing import NDArray

from inflight.distributed.bell import Bell

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

NAP = 0.00005
"""Seconds; the system makes about twice as much of it."""
MAX_NAP = 0.01
"""100 looks a second cost an idle follower on another machine less than 1 % of a core; a first request waits 5 ms
longer on average."""
NAP_GROWTH = 1.25

SHARED_MEMORY = Path("/dev/shm")


class MpiRankGroup:
    """Implements rank_group.RankGroup over MPI_COMM_WORLD."""

    def __init__(self, folder: Path | None = None) -> None:
        """Start MPI. Collective. `folder`: private and of the engine's own; None on machines that do not have it."""
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_FUNNELED)
        self._comm = MPI.COMM_WORLD
        # A failing call raises here, so that the rank can say a sentence; the default handler would abort without one.
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._count: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._rings: Bell | None = None  # of the leader
        self._hears: Bell | None = None  # of the others
        _unlink_shared_memory(self)
        self._hang_bell(folder)

    def broadcast(self, payload: bytes | None) -> bytes:
        """The leader's payload, on every rank: its length, then its bytes if it has any."""
        if self.rank == 0:
            assert payload is not None
            self._count[0] = len(payload)
        self._complete(self._comm.Ibcast(self._count, root=0))
        length = int(self._count[0])
        if length == 0:
            return b""
        buffer: NDArray[np.uint8] = np.empty(length, dtype=np.uint8)
        if payload is not None:
            buffer[:] = np.frombuffer(payload, dtype=np.uint8)
        self._complete(self._comm.Ibcast(buffer, root=0))
        return payload if payload is not None else buffer.tobytes()

    def barrier(self) -> None:
        self._complete(self._comm.Ibarrier())

    def close(self) -> None:
        """Leave MPI. Collective; nothing of MPI works in this process afterwards."""
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
        for bell in (self._rings, self._hears):
            if bell is not None:
                bell.close()

    def abort(self) -> None:
        """End every rank of every machine, this one included."""
        self._comm.Abort(1)

    def _hang_bell(self, folder: Path | None) -> None:
        """Others listen only if the leader can ring, and they can hear it. Before, nobody rings or listens."""
        bell = Bell(folder, self.rank, self.size) if folder is not None else None
        self.barrier()  # a ring before there is a socket would be missed
        leader_rings = self.broadcast((b"1" if bell is not None else b"") if self.rank == 0 else None) != b""
        if self.rank == 0:
            self._rings = bell
        elif leader_rings:
            self._hears = bell

    def _complete(self, request: Any) -> None:
        """Wait for an operation that was just begun."""
        if self._rings is not None:
            self._rings.ring()
        if self._hears is not None:
            self._hears.wait()
        nap = NAP
        while not request.Test():
            time.sleep(nap)
            nap = min(nap * NAP_GROWTH, MAX_NAP)


def library_version() -> str:
    """First line of what the MPI library says of itself."""
    return str(MPI.Get_library_version()).splitlines()[0].strip()


def _unlink_shared_memory(group: MpiRankGroup) -> None:
    """Remove the names of the library's shared-memory regions once every rank of this machine has opened them.

    A rank that is killed cannot do so any more, and nobody else knows the names.
    """
    group.barrier()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = Path(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
        if target.parent == SHARED_MEMORY and target.name.startswith("mpich_shm_"):
            target.unlink(missing_ok=True)
    group.barrier()
