"""A wake-up reaches whoever waits, before or after the wait began; each is received once and none is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from inflight.distributed.wakeup import WakeupSocket

PATIENCE = 100.0
MANY = 1000
"""More wake-ups than any queue of the system holds."""

Begin = Callable[[Callable[[], object]], "Future[object]"]


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[list[WakeupSocket]]:
    sockets = [WakeupSocket(tmp_path, rank, 4) for rank in range(3)]  # the fourth is on another machine
    yield sockets
    for each in sockets:
        each.close()


@pytest.fixture
def begin() -> Iterator[Begin]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def test_a_wakeup_reaches_every_waiting_rank(sockets: list[WakeupSocket], begin: Begin) -> None:
    waiting = [begin(each.wait) for each in sockets[1:]]
    sockets[0].wake_others()
    for each in waiting:
        each.result(PATIENCE)


def test_wakeups_that_nobody_waited_for_are_received_one_by_one(sockets: list[WakeupSocket], begin: Begin) -> None:
    for _ in range(3):
        sockets[0].wake_others()
    for each in sockets[1:]:
        for _ in range(3):
            begin(each.wait).result(PATIENCE)
        with pytest.raises(BlockingIOError):
            each._socket.recv(1, socket.MSG_DONTWAIT)


def test_no_wakeup_is_lost_on_a_rank_that_lags_behind(sockets: list[WakeupSocket], begin: Begin) -> None:
    lags = threading.Event()

    def hear_all() -> None:
        assert lags.wait(PATIENCE)
        for _ in range(MANY):
            sockets[2].wait()

    def hear_all_at_once() -> None:
        for _ in range(MANY):
            sockets[1].wait()

    receiving = [begin(hear_all), begin(hear_all_at_once)]
    waking = begin(lambda: [sockets[0].wake_others() for _ in range(MANY)])
    lags.set()
    for each in (waking, *receiving):
        each.result(PATIENCE)


def test_ranks_that_are_gone_are_left_out(sockets: list[WakeupSocket], begin: Begin) -> None:
    sockets[1].close()
    sockets[0].wake_others()
    begin(sockets[2].wait).result(PATIENCE)
