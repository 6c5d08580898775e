"""TCP ports for the servers that tests start: below those that the engine chooses itself (inflight.free_port) and those
that the system hands out, and each process of tests has its own. So nothing takes a port between its choice and the
start of its server, nor while a server that has died is started again.
"""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

FIRST, END = 10_000, 20_000
BLOCK = 64
"""Ports of one process."""


def free_port() -> int:
    """On 127.0.0.1. One that was given out is given out again after all others."""
    _, ports = _block()
    return next(port for port in ports if _is_free(port))


@cache
def _block() -> tuple[socket.socket, Iterator[int]]:
    """The socket that keeps this process's block, by its first port, and the other ports again and again."""
    firsts = list(range(FIRST, END - BLOCK, BLOCK))
    random.SystemRandom().shuffle(firsts)
    for first in firsts:
        keeper = socket.socket()
        try:
            keeper.bind(("127.0.0.1", first))
        except OSError:
            keeper.close()
        else:
            return keeper, itertools.cycle(range(first + 1, first + BLOCK))
    raise RuntimeError(f"no block of {BLOCK} ports is free between {FIRST} and {END}")


def _is_free(port: int) -> bool:
    with socket.socket() as tried, suppress(OSError):
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(("127.0.0.1", port))
        tried.listen()
        return True
    return False
