"""Wakes the ranks of one machine that have waited long: an empty datagram to the socket that each has in a folder.

Waiting inside MPI would take a whole core, and asking it again and again either much of one or milliseconds of delay.
Knows nothing of MPI; a ring says no more than that it is worth asking now.
"""

from __future__ import annotations

import contextlib
import select
import socket
from pathlib import Path

NAME = "bell."


class Bell:
    """One rank's end. For one thread."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        """`folder`: private to the engine's user, the same for all ranks that are to hear each other."""
        self._others = [str(folder / f"{NAME}{other}") for other in range(size) if other != rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(folder / f"{NAME}{rank}"))

    def ring(self) -> None:
        """Wake all others. Never waits: who is not there needs no waking, and whose queue is full has been rung for."""
        for path in self._others:
            with contextlib.suppress(OSError):
                self._socket.sendto(b"", path)

    def wait(self, seconds: float) -> bool:
        """True as soon as somebody rings, or has rung since the last call; False after `seconds`."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        return True

    def close(self) -> None:
        self._socket.close()
