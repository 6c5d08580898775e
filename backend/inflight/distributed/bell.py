"""Wakes the ranks of one machine for what the leader begins: one empty datagram each, to the socket that each has in a
folder.

Waiting inside MPI would take a whole core, and asking it again and again either much of one or milliseconds of delay.
Every ring is heard once, also if it came before anybody waited for it, so that none can be missed. Knows nothing of
MPI: a ring says no more than that it is worth asking now.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

NAME = "bell."


class Bell:
    """One rank's end. For one thread."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        """`folder`: private to the engine's user, the same for all ranks that are to hear each other."""
        self._others = [str(folder / f"{NAME}{other}") for other in range(size) if other != rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / f"{NAME}{rank}"))

    def ring(self) -> None:
        """Ring for all others. Waits for one that has not heard the last ten or so; who is not there is left out."""
        for path in self._others:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self._socket.sendto(b"", path)

    def wait(self) -> None:
        """Sleep until somebody has rung once more than this was called."""
        self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()
