"""The program of one rank: times a broadcast through MPI, the ring in shared memory and TCP, in turn.

Started by `python -m ci.bench.ranks` under MPI, with a private folder and a free port as arguments. A broadcast takes
from the leader's call until the last rank has the message, while all others wait for it already. The leader prints
{way: {bytes: microseconds, a median}} as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from inflight.distributed.joining import Meeting, join
from inflight.distributed.mpi import MPI, MpiRankGroup
from inflight.distributed.rank_group import RankGroup
from inflight.distributed.sockets import SocketRankGroup

LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000, 20_000_000)
ROUNDS = 15
CALLS = 10
"""Consecutive calls of one way in one round."""
HEAD_START = 0.0002
"""Seconds that the leader leaves the other ranks to begin to wait, as they do in an engine."""
LONG = 1_000_000
"""Bytes from which one call a round is enough."""


def main() -> None:
    folder, port = Path(sys.argv[1]), sys.argv[2]
    mpi = MpiRankGroup(folder)
    place = {"rank": mpi.rank, "size": mpi.size}
    ways: dict[str, RankGroup] = {
        "mpi": mpi,
        "multiproc": join(Meeting(), **place, folder=folder),
        "TCP": SocketRankGroup(f"tcp://127.0.0.1:{port}", **place, secret="0123456789abcdef" * 2),
    }
    times: dict[str, dict[int, list[tuple[float, float]]]] = {name: defaultdict(list) for name in ways}
    """Of each broadcast: when it began and ended here."""
    for length in LENGTHS:
        message = os.urandom(length) if mpi.rank == 0 else None
        for _ in range(ROUNDS):
            for name, group in ways.items():
                for _ in range(1 if length >= LONG else CALLS):
                    times[name][length].append(_broadcast(group, message))
    found = {name: {length: _microseconds(mpi, own) for length, own in row.items()} for name, row in times.items()}
    if mpi.rank == 0:
        print(json.dumps(found), flush=True)
    for group in reversed(ways.values()):
        group.barrier()
        group.close()


def _broadcast(group: RankGroup, message: bytes | None) -> tuple[float, float]:
    group.barrier()
    if group.rank == 0:
        time.sleep(HEAD_START)
    start = time.monotonic()
    group.broadcast(message)
    return start, time.monotonic()


def _microseconds(mpi: MpiRankGroup, own: list[tuple[float, float]]) -> float:
    """Median on the leader, from its start to the last end: all processes of a machine have one monotonic clock."""
    all_ranks = np.zeros((mpi.size, len(own), 2))
    MPI.COMM_WORLD.Gather(np.array(own), all_ranks, root=0)
    return round(float(np.median(all_ranks[:, :, 1].max(axis=0) - all_ranks[0, :, 0])) * 1e6, 1)


if __name__ == "__main__":
    main()
