"""A RankGroup over MPI. Only raw buffers are exchanged: nothing that a rank receives is unpickled.

A wait inside MPI would keep a whole core busy. So the leader sends a wake-up for each operation that it has started,
and a rank on its machine sleeps until then: for microseconds while steps run, for hours in an idle engine. Then it
polls the operation until it completes, with pauses that grow. Ranks on other machines get no wake-up and only poll. No
rank spins, because the running step needs the core and the GIL. To be used from one thread only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
from numpy.typing import NDArray

from inflight.distributed.wakeup import WakeupSocket

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

NAP = 0.00005
"""First pause between two polls, in seconds; the system makes it about twice as long."""
MAX_NAP = 0.01
"""Longest pause, in seconds. 100 polls a second cost an idle follower on another machine less than 1 % of a core, and
delay the first request after an idle time by 5 ms on average."""
NAP_GROWTH = 1.25

SHARED_MEMORY = Path("/dev/shm")


class MpiRankGroup:
    """Implements rank_group.RankGroup over MPI_COMM_WORLD."""

    def __init__(self, folder: Path | None = None) -> None:
        """Initialise MPI. Collective. `folder`: the launch's private directory; None on machines that lack it."""
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_FUNNELED)
        self._comm = MPI.COMM_WORLD
        # A failing call raises, so that the rank can report the reason; the default handler would abort without one.
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        here = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.several_hosts: bool = here.Get_size() < self.size
        here.Free()
        self._count: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._wakes: WakeupSocket | None = None  # on the leader, if it can wake others
        self._listens: WakeupSocket | None = None  # on the other ranks, if the leader can wake them
        _unlink_shared_memory(self)
        self._open_wakeups(folder)

    def broadcast(self, payload: bytes | None) -> bytes:
        """See RankGroup. Sends the length first, then the bytes unless the payload is empty."""
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
        """Finalise MPI. Collective; this process cannot use MPI afterwards."""
        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
        for wakeup in (self._wakes, self._listens):
            if wakeup is not None:
                wakeup.close()

    def abort(self) -> None:
        """End every rank of every machine, this one included."""
        self._comm.Abort(1)

    def _open_wakeups(self, folder: Path | None) -> None:
        """Set up wake-ups. A rank sleeps only if the leader sends wake-ups and the rank can receive them."""
        # Ranks that did not find each other are all rank 0 of a group of one, and would use the same socket.
        wakeup = WakeupSocket(folder, self.rank, self.size) if folder is not None and self.size > 1 else None
        self.barrier()  # a wake-up that is sent before its receiver's socket exists would be lost
        leader_wakes = self.broadcast((b"1" if wakeup is not None else b"") if self.rank == 0 else None) != b""
        if self.rank == 0:
            self._wakes = wakeup
        elif leader_wakes:
            self._listens = wakeup

    def _complete(self, request: Any) -> None:
        """Wait for an operation that has just been started; the leader first wakes the other ranks."""
        if self._wakes is not None:
            self._wakes.wake_others()
        if self._listens is not None:
            self._listens.wait()
        nap = NAP
        while not request.Test():
            time.sleep(nap)
            nap = min(nap * NAP_GROWTH, MAX_NAP)


def library_version() -> str:
    """First line of the MPI library's version text."""
    return str(MPI.Get_library_version()).splitlines()[0].strip()


def _unlink_shared_memory(group: MpiRankGroup) -> None:
    """Remove the names of the library's shared-memory regions once every rank of this machine has opened them.

    A rank that is killed later cannot remove them, and no other process knows the names.
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
