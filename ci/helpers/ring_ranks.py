"""Ranks without MPI, each in a process of its own, and a random history of messages that they exchange."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from inflight.distributed.ring_group import RingRankGroup
from inflight.distributed.sockets import SocketRankGroup

PATIENCE = 120
"""Seconds after which something that should happen counts as never happening."""


@dataclass(frozen=True)
class Ranks:
    """How they meet, and the shape of their ring."""

    endpoint: str
    size: int
    secret: str = ""
    chunk_bytes: int = 0
    """0 = without a ring."""
    num_chunks: int = 3
    far: tuple[int, ...] = ()
    """Ranks that cannot open the leader's memory."""

    def join(self, rank: int) -> SocketRankGroup | RingRankGroup:
        sockets = SocketRankGroup(self.endpoint, rank=rank, size=self.size, secret=self.secret, join_seconds=PATIENCE)
        if not self.chunk_bytes:
            return sockets
        if rank in self.far:
            os.open = _refuse  # type: ignore[assignment]
        return RingRankGroup(sockets, chunk_bytes=self.chunk_bytes, num_chunks=self.num_chunks)


def _refuse(*args: Any, **kwargs: Any) -> int:
    raise PermissionError("as in another PID namespace")


class RankProcess:
    """Runs the generator `function(ranks, rank, *arguments)`."""

    def __init__(self, function: Callable[..., Any], ranks: Ranks, rank: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._answer, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(theirs, function, ranks, rank, *arguments))
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        """The next value that the function yields or, as a string, the exception that it raised."""
        assert self._answer.poll(PATIENCE), "a rank did not answer"
        return self._answer.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join()


def _main(answer: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        for value in function(*arguments):
            answer.send(value)
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def history(seed: int, count: int, lengths: tuple[int, ...]) -> list[bytes | None]:
    """Random messages of such lengths or a little less; None is a barrier."""
    rng = random.Random(seed)
    return [
        None if rng.random() < 0.1 else rng.randbytes(max(0, rng.choice(lengths) - rng.randrange(3)))
        for _ in range(count)
    ]


def play(ranks: Ranks, rank: int, seed: int, count: int, lengths: tuple[int, ...]) -> Any:
    """Yields a digest of all that the rank received."""
    group = ranks.join(rank)
    digest = hashlib.sha256()
    for message in history(seed, count, lengths):
        if message is None:
            group.barrier()
        else:
            received = group.broadcast(message if rank == 0 else None)
            digest.update(len(received).to_bytes(8, "little") + received)
    group.barrier()
    yield digest.hexdigest()
    group.close()
