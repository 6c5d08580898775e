"""Ranks that die or hang: every request is answered once, and the ranks are launched again."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from fake_ranks import PATIENCE, Launcher, fetch, pid_of, stopped, submit, wait_until_ready
from fake_worker import Order

from inflight.config import EngineConfig
from inflight.errors import EngineUnavailable

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("order", [Order.EXIT, Order.FATAL])
def test_ranks_that_end_fail_what_is_in_flight_once_and_are_launched_again(launcher: Launcher, order: Order) -> None:
    executor = launcher()
    executor.start()
    held = [submit(executor, Order.HOLD) for _ in range(3)]
    first = pid_of(fetch(executor, 3)[0])
    fatal = submit(executor, order)
    token, *errors = fetch(executor, 1 + 4)
    assert token.request_id == fatal
    assert sorted(error.request_id for error in errors) == [*held, fatal]
    assert {error.error_code for error in errors} == {"UNAVAILABLE"}
    wait_until_ready(executor)
    submit(executor, Order.ANSWER)
    assert pid_of(fetch(executor, 2)[0]) != first


def test_a_killed_rank_that_was_idle_is_launched_again(launcher: Launcher) -> None:
    died = threading.Event()
    executor = launcher(on_engine_death=lambda reason: died.set())
    executor.start()
    (pid,) = executor.engine_pids()
    os.kill(pid, signal.SIGKILL)
    assert died.wait(PATIENCE)
    wait_until_ready(executor)
    submit(executor, Order.ANSWER)
    fetch(executor, 2)


def test_a_hung_rank_counts_as_dead_after_the_heartbeats_deadline(launcher: Launcher) -> None:
    reasons: list[str] = []
    executor = launcher(config=EngineConfig(worker_heartbeat_timeout_ms=1000), on_engine_death=reasons.append)
    executor.start()
    request_id = submit(executor, Order.HOLD)
    first = pid_of(fetch(executor, 1)[0])
    with stopped(first):
        (error,) = fetch(executor, 1)
        assert (error.request_id, error.error_code) == (request_id, "UNAVAILABLE")
        wait_until_ready(executor)
    assert "no heartbeat" in reasons[0]
    submit(executor, Order.ANSWER)
    assert pid_of(fetch(executor, 2)[0]) != first


def test_a_pause_shorter_than_the_deadline_harms_nobody(launcher: Launcher) -> None:
    reasons: list[str] = []
    executor = launcher(config=EngineConfig(worker_heartbeat_timeout_ms=60_000), on_engine_death=reasons.append)
    executor.start()
    (pid,) = executor.engine_pids()
    with stopped(pid):
        submit(executor, Order.ANSWER)
        assert executor.await_responses(timeout=0.5) == []
    fetch(executor, 2)
    assert reasons == []


def test_requests_that_come_while_the_ranks_are_brought_back_are_served_by_the_next_ones(launcher: Launcher) -> None:
    died = threading.Event()
    executor = launcher(on_engine_death=lambda reason: died.set())
    executor.start()
    submit(executor, Order.EXIT)
    first = pid_of(fetch(executor, 2)[0])
    assert died.wait(PATIENCE)
    request_id = submit(executor, Order.ANSWER)
    responses = fetch(executor, 2)
    assert {response.request_id for response in responses} == {request_id}
    assert pid_of(responses[0]) != first


def test_ranks_that_cannot_be_brought_back_at_once_are_down_until_a_relaunch_is_asked_for(
    launcher: Launcher, tmp_path: Path
) -> None:
    deaths = threading.Semaphore(0)
    executor = launcher("serve once", keep_trying=False, on_engine_death=lambda reason: deaths.release())
    executor.start()
    submit(executor, Order.EXIT)
    for _ in range(2):
        assert deaths.acquire(timeout=PATIENCE)
    assert not deaths.acquire(timeout=1)
    assert len(list(tmp_path.iterdir())) == 2
    assert executor.is_down() and not executor.is_ready()
    with pytest.raises(EngineUnavailable):
        submit(executor, Order.ANSWER)
    executor.relaunch()
    assert deaths.acquire(timeout=PATIENCE)
    assert len(list(tmp_path.iterdir())) == 3


def test_ranks_that_cannot_be_brought_back_are_tried_again_for_ever(launcher: Launcher, tmp_path: Path) -> None:
    deaths = threading.Semaphore(0)
    executor = launcher("serve once", on_engine_death=lambda reason: deaths.release())
    executor.start()
    submit(executor, Order.EXIT)
    for _ in range(10):
        assert deaths.acquire(timeout=PATIENCE)
