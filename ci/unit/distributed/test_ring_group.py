"""Ranks without MPI: every rank receives every byte in order, over the ring, over sockets and over both; and whoever
waits for a dead rank notices.

Run: pytest ci/unit/distributed/test_ring_group.py
"""

from __future__ import annotations

import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from free_ports import free_port
from ring_ranks import PATIENCE, RankProcess, Ranks, play

from inflight.distributed import sockets
from inflight.distributed.joining import Meeting, join
from inflight.distributed.rank_group import SingleRank
from inflight.distributed.ring import CHUNK_BYTES, NUM_CHUNKS, PAGE, RingShape
from inflight.distributed.sockets import SocketRankGroup
from inflight.errors import ConfigurationError

SECRET = "0123456789abcdef" * 4
CHUNK = 10_000
LENGTHS = (0, 1, 100, CHUNK, CHUNK + 3, 40 * CHUNK)
MANY = 400


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's address."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        yield Path(folder)


@contextmanager
def running(function: Any, ranks: Ranks, *arguments: Any) -> Iterator[list[RankProcess]]:
    processes = [RankProcess(function, ranks, rank, *arguments) for rank in range(ranks.size)]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "chunk_bytes", "far", "way"),
    [
        (4, CHUNK, (), "ipc"),
        (4, CHUNK, (2,), "ipc"),
        (2, CHUNK, (1,), "tcp"),
        (3, CHUNK, (), "tcp"),
        (3, 0, (), "tcp"),
    ],
    ids=["ring", "ring and sockets", "nobody reads the ring", "ring beside TCP", "TCP alone"],
)
def test_every_rank_receives_every_byte(
    place: Path, size: int, chunk_bytes: int, far: tuple[int, ...], way: str
) -> None:
    """Messages that fill a chunk to the byte, that no chunk holds, and none; often around the ring."""
    endpoint = f"ipc://{place}/socket" if way == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    ranks = Ranks(endpoint, size, SECRET if way == "tcp" else "", chunk_bytes=chunk_bytes, far=far)
    seed = random.randrange(2**32)
    with running(play, ranks, seed, MANY, LENGTHS) as processes:
        answers = [process.answer() for process in processes]
    assert len(set(answers)) == 1, seed
    assert len(answers[0]) == 64, answers
    assert list(place.iterdir()) == []


def wait_for_others(ranks: Ranks, rank: int, waits: str) -> Any:
    """Joins, and waits for what never comes; the last rank only sleeps, and the first one where the others wait."""
    group = ranks.join(rank)
    group.barrier()
    yield "joined"
    if rank == (ranks.size - 1 if waits == "leader" else 0):
        threading.Event().wait()
    while True:
        group.broadcast(b"x" * 100 if rank == 0 else None)


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["leader", "followers"])
def test_who_waits_for_a_killed_process_notices(place: Path, waits: str) -> None:
    """The leader when the ring is full, the followers when nothing is in it; also a follower that has no part in it."""
    ranks = Ranks(f"ipc://{place}/socket", 3, chunk_bytes=CHUNK, far=(1,) if waits == "followers" else ())
    with running(wait_for_others, ranks, waits) as processes:
        assert [process.answer() for process in processes] == ["joined"] * 3
        if waits == "leader":
            processes[2].signal(signal.SIGKILL)
            assert "ConnectionError: process" in processes[0].answer()
            processes[0].end()
            assert "ConnectionError: process" in processes[1].answer()
        else:
            processes[0].signal(signal.SIGKILL)
            assert "ConnectionError: the connection to rank 0 has ended" in processes[1].answer()
            assert "ConnectionError: process" in processes[2].answer()


def test_strangers_cannot_join() -> None:
    """Neither without keys, nor with another secret; they get no answer, and those who belong there still join."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    found: list[SocketRankGroup] = []
    leader = threading.Thread(
        target=lambda: found.append(SocketRankGroup(endpoint, rank=0, size=2, secret=SECRET, join_seconds=PATIENCE))
    )
    leader.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(endpoint)
        plain.send(b"\x93\x01\xa0\xc4\x00")
        with pytest.raises(ConfigurationError, match="or has another secret"):
            SocketRankGroup(endpoint, rank=1, size=2, secret="f" * 64, join_seconds=1)
        assert not found
        member = SocketRankGroup(endpoint, rank=1, size=2, secret=SECRET, join_seconds=PATIENCE)
        leader.join(PATIENCE)
        found[0].broadcast(b"welcome")
        assert member.broadcast(None) == b"welcome"
        assert not plain.poll(0)
    for group in (member, found[0]):
        group.close()


def test_a_rank_that_does_not_come_is_named(place: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ranks 1, 2 did not find rank 0 at ipc://"):
        SocketRankGroup(f"ipc://{place}/socket", rank=0, size=3, join_seconds=0.01)
    with pytest.raises(ConfigurationError, match=r"rank 2 did not find rank 0 at ipc://"):
        SocketRankGroup(f"ipc://{place}/socket", rank=2, size=3, join_seconds=0.01)


@pytest.mark.parametrize(
    ("endpoint", "secret", "sentence"),
    [
        ("tcp://*:5000", SECRET, "of one interface"),
        ("tcp://0.0.0.0:5000", SECRET, "of one interface"),
        ("tcp://[::]:5000", SECRET, "of one interface"),
        ("tcp://127.0.0.1", SECRET, "of one interface"),
        ("tcp://127.0.0.1:0", SECRET, "of one interface"),
        ("udp://127.0.0.1:5000", SECRET, "of one interface"),
        ("tcp://127.0.0.1:5000", "", "with a secret of 32 characters"),
        ("tcp://127.0.0.1:5000", "short", "with a secret of 32 characters"),
    ],
)
def test_an_open_port_is_refused(endpoint: str, secret: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        SocketRankGroup(endpoint, rank=0, size=2, secret=secret)


def test_ranks_of_different_machines_know_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["here", "there"])
    monkeypatch.setattr(sockets, "machine", lambda: next(names))
    found: list[SocketRankGroup] = []

    def meet(rank: int) -> None:
        found.append(SocketRankGroup(f"ipc://{place}/socket", rank=rank, size=2, join_seconds=PATIENCE))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [group.several_hosts for group in found] == [True, True]
    for group in found:
        group.close()


@pytest.mark.parametrize("num_readers", [1, 3, 40])
def test_a_ring_has_chunks_that_overlap_nothing(num_readers: int) -> None:
    shape = RingShape(num_readers)
    starts = [shape.chunk_offset(chunk) for chunk in range(NUM_CHUNKS + 1)]
    assert all(start % PAGE == 0 for start in starts)
    assert all(second - first > CHUNK_BYTES for first, second in pairwise(starts))
    assert starts[0] >= num_readers * 3 * 64


def test_a_launch_tells_its_ranks_how_to_meet(place: Path) -> None:
    assert isinstance(join(Meeting(), rank=0, size=1, folder=place), SingleRank)
    with pytest.raises(ConfigurationError, match="2 ranks were launched and this one was told the number None"):
        join(Meeting(), rank=None, size=2, folder=place)
    with pytest.raises(ConfigurationError, match="need a TCP endpoint to meet at"):
        join(Meeting(), rank=0, size=2, folder=None)
