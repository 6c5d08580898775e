"""A ring wakes whoever listens, before or after it began; each is heard once and none is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from inflight.distributed.bell import Bell

PATIENCE = 30.0
MANY = 1000
"""More rings than any queue of the system's holds."""

Begin = Callable[[Callable[[], object]], "Future[object]"]


@pytest.fixture
def bells(tmp_path: Path) -> Iterator[list[Bell]]:
    bells = [Bell(tmp_path, rank, 4) for rank in range(3)]  # the fourth is on another machine
    yield bells
    for bell in bells:
        bell.close()


@pytest.fixture
def begin() -> Iterator[Begin]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def test_a_ring_wakes_every_listener(bells: list[Bell], begin: Begin) -> None:
    waiting = [begin(bell.wait) for bell in bells[1:]]
    bells[0].ring()
    for each in waiting:
        each.result(PATIENCE)


def test_rings_that_nobody_waited_for_are_heard_one_by_one(bells: list[Bell], begin: Begin) -> None:
    for _ in range(3):
        bells[0].ring()
    for bell in bells[1:]:
        for _ in range(3):
            begin(bell.wait).result(PATIENCE)
        with pytest.raises(BlockingIOError):
            bell._socket.recv(1, socket.MSG_DONTWAIT)


def test_no_ring_is_lost_on_a_listener_that_lags_behind(bells: list[Bell], begin: Begin) -> None:
    lags = threading.Event()

    def hear_all() -> None:
        assert lags.wait(PATIENCE)
        for _ in range(MANY):
            bells[2].wait()

    def hear_all_at_once() -> None:
        for _ in range(MANY):
            bells[1].wait()

    hearing = [begin(hear_all), begin(hear_all_at_once)]
    ringing = begin(lambda: [bells[0].ring() for _ in range(MANY)])
    lags.set()
    for each in (ringing, *hearing):
        each.result(PATIENCE)


def test_ranks_that_are_gone_are_left_out(bells: list[Bell], begin: Begin) -> None:
    bells[1].close()
    bells[0].ring()
    begin(bells[2].wait).result(PATIENCE)
