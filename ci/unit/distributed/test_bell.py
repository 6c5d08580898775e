"""A ring wakes whoever listens, before or after it began, and waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.distributed.bell import Bell

LONG = 30.0


@pytest.fixture
def bells(tmp_path: Path) -> Iterator[list[Bell]]:
    bells = [Bell(tmp_path, rank, 4) for rank in range(3)]  # the fourth is on another machine
    yield bells
    for bell in bells:
        bell.close()


def test_a_ring_wakes_every_listener(bells: list[Bell]) -> None:
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda bell=bell: heard.append(bell.wait(LONG))) for bell in bells[1:]]
    for thread in threads:
        thread.start()
    bells[0].ring()
    for thread in threads:
        thread.join()
    assert heard == [True, True]
    assert not bells[0].wait(0)


def test_a_ring_that_nobody_waited_for_is_heard_once(bells: list[Bell]) -> None:
    for _ in range(1000):
        bells[0].ring()
    assert bells[1].wait(0) and not bells[1].wait(0)


def test_ranks_that_are_gone_need_no_waking(bells: list[Bell]) -> None:
    bells[1].close()
    bells[0].ring()
    assert bells[2].wait(0)
