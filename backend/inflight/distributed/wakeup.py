"""Wakes the ranks of one machine when the leader starts an operation: an empty datagram to a socket of each rank.

A wait inside MPI would occupy a core, and polling costs CPU time or adds milliseconds of delay. The socket queues
wake-ups, so one that is sent before its receiver waits is not lost. Knows nothing of MPI: a wake-up only means that it
is worth polling now.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

NAME = "wakeup."


class WakeupSocket:
    """The socket of one rank. Not thread safe."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        """`folder`: private to the engine's user, the same for all ranks that wake each other."""
        self._others = [str(folder / f"{NAME}{other}") for other in range(size) if other != rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / f"{NAME}{rank}"))

    def wake_others(self) -> None:
        """Send a wake-up to all other ranks. Blocks while a rank has about ten unread; absent ranks are skipped."""
        for path in self._others:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self._socket.sendto(b"", path)

    def wait(self) -> None:
        """Receive one wake-up: returns at once if one is queued, otherwise sleeps until one arrives."""
        self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()
