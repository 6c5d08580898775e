"""The end of an executor with ranks in a process of their own: nothing is left, whoever goes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import scripted_leader
from calls import until
from scripted_leader import Order
from scripted_ranks import PATIENCE, Launcher, fetch, launched, submit

from inflight.errors import EngineUnavailable
from inflight.executor.front import connection

pytestmark = pytest.mark.slow


def test_shutdown_answers_what_is_in_flight_and_leaves_nothing(
    launcher: Launcher, tmp_path: Path, run_directory: Path
) -> None:
    executor = launcher()
    executor.start()
    request_id = submit(executor, Order.HOLD)
    fetch(executor, 1)
    executor.shutdown()
    executor.shutdown()
    (response,) = executor.await_responses(timeout=0)
    assert (response.request_id, response.error_code) == (request_id, "UNAVAILABLE")
    assert executor.await_responses() == []
    assert launched(tmp_path) == []
    assert list(run_directory.iterdir()) == []
    with pytest.raises(EngineUnavailable):
        submit(executor, Order.ANSWER)


def test_a_front_that_is_shut_down_leaves_no_open_file(launcher: Launcher) -> None:
    """At once: a server whose models are loaded on demand has many of them. It may still be asked to cancel."""
    counts = []
    for _ in range(3):
        executor = launcher()
        executor.start()
        executor.shutdown()
        executor.cancel_request(1)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] == counts[1]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_ranks_that_do_not_hear_the_shutdown_are_killed(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    monkeypatch.setattr(connection, "SHUTDOWN_SECONDS", 0.2)
    executor = launcher("deaf")
    executor.start()
    (pid,) = executor.engine_pids()
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    executor.shutdown()
    assert launched(tmp_path) == []


def test_ranks_that_load_are_not_waited_for(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SHUTDOWN_SECONDS", 3600.0)
    executor = launcher("never ready")
    executor.begin()
    assert len(executor.engine_pids()) == 1
    executor.shutdown()
    assert launched(tmp_path) == []


def test_shutdown_ends_a_start(launcher: Launcher, tmp_path: Path) -> None:
    executor = launcher("never ready")
    outcome: list[Exception] = []

    def start() -> None:
        try:
            executor.start()
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    with executor._changed:
        executor._changed.wait_for(lambda: any(tmp_path.iterdir()), 0.5)
    executor.shutdown()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert outcome
    assert launched(tmp_path) == []


def test_shutdown_during_a_relaunch_answers_each_waiting_request_once(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks load for as long as they are left alone."""
    monkeypatch.setattr(connection, "SHUTDOWN_SECONDS", 0.2)
    executor = launcher("never ready again")
    executor.start()
    assert not executor.is_relaunching()
    lost = submit(executor, Order.EXIT)
    fetch(executor, 1)
    until(lambda: len(list(tmp_path.iterdir())) == 2, "the ranks are launched again")
    waiting = [submit(executor, Order.ANSWER) for _ in range(3)]
    assert executor.is_relaunching() and not executor.is_ready() and not executor.is_down()
    executor.shutdown()
    assert [(each.request_id, each.error_code) for each in executor.await_responses(timeout=0)] == [
        (request_id, "UNAVAILABLE") for request_id in (lost, *waiting)
    ]
    assert executor.await_responses() == [] and not executor.is_relaunching()


FRONT = """
import sys
import time
from inflight.config import EngineConfig
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.executor.launchers.spares import SpareLauncher
from inflight.executor.launchers.uniproc import UniProc
config = EngineConfig(spare_ranks=1, max_tokens_in_paged_kv_cache=4096)
executor = RemoteFront(config, SpareLauncher(config, lambda: ProcessLauncher(config, UniProc(sys.argv[1:]))))
executor.start()
while not executor.num_spares():
    time.sleep(0.05)
print(*executor.engine_pids(), flush=True)
if sys.stdin.readline():
    sys.exit(0)
"""


@contextmanager
def front_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process with a started executor that has a spare, and the pid of its only rank."""
    command = [sys.executable, "-c", FRONT, scripted_leader.__file__, "serve", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def wait_for_end(pid: int) -> None:
    """Until the process `pid` is gone; it is no child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(PATIENCE * 1000), f"process {pid} did not end"
    os.close(descriptor)


def test_ranks_end_with_a_front_that_was_killed(tmp_path: Path, run_directory: Path) -> None:
    with front_process(tmp_path) as (process, rank):
        process.kill()
        wait_for_end(rank)
        until(lambda: not launched(tmp_path), "the spare ends, too")


def test_an_interpreter_that_exits_takes_its_ranks_along_and_does_not_hang(tmp_path: Path, run_directory: Path) -> None:
    with front_process(tmp_path) as (process, rank):
        assert process.stdin is not None
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(PATIENCE) == 0
        wait_for_end(rank)
        until(lambda: not launched(tmp_path), "the spare ends, too")
        assert list(run_directory.iterdir()) == []
