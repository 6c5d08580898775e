"""A free TCP port for a server that begins to listen later, in another process, than its port is chosen."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that Linux gives to connections and listeners that name none."""
FIRST = 20_000
"""Services that people know by number are mostly below."""
TRIES = 64


def bind_free_port(listener: socket.socket, where: tuple[Any, ...]) -> None:
    """Bind to a free port of the address in `where`, a socket address whose port is not used.

    It is below the ephemeral ports, so that no connection takes it before its server listens. Where none of those that
    are tried is free, the system chooses. Raises OSError if the address cannot be bound.
    """
    for port in (*_candidates(), 0):
        try:
            listener.bind((where[0], port, *where[2:]))
        except OSError as error:
            if port == 0 or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            return


def free_port(address: str) -> int:
    """Of an IPv4 address of this machine. Raises OSError if it cannot be bound."""
    with socket.socket() as listener:
        bind_free_port(listener, (address, 0))
        return int(listener.getsockname()[1])


def _candidates() -> Iterator[int]:
    first_ephemeral = int(EPHEMERAL.read_text(encoding="ascii").split()[0]) if EPHEMERAL.is_file() else 0
    if first_ephemeral > FIRST:
        yield from (random.SystemRandom().randrange(FIRST, first_ephemeral) for _ in range(TRIES))
