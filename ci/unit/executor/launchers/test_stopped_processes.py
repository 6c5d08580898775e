"""Which processes count as stopped by a signal, and when.

pytest ci/unit/executor/launchers/test_stopped_processes.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.executor.launchers.stopped_processes import INTERVAL, STOPPED_SECONDS, StoppedProcesses

PATIENCE = 30.0
"""Seconds."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that waits."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def send(pid: int, number: signal.Signals, *, stops: bool) -> None:
    """A signal, and wait until the process's state shows it."""
    os.kill(pid, number)
    deadline = time.monotonic() + PATIENCE
    while ("T" in Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]) is not stops:
        assert time.monotonic() < deadline, "the signal has no effect"
        time.sleep(0.01)


def looks(stopped: StoppedProcesses, clock: Clock, seconds: float) -> list[int | None]:
    found = []
    for _ in range(round(seconds / INTERVAL)):
        clock.now += INTERVAL
        found.append(stopped.look())
    return found


def test_a_stopped_process_is_found_after_its_time_and_one_that_waits_never(sleeper: int) -> None:
    clock = Clock()
    stopped = StoppedProcesses(lambda: [os.getpid(), sleeper], clock)
    assert set(looks(stopped, clock, 10 * STOPPED_SECONDS)) == {None}
    send(sleeper, signal.SIGSTOP, stops=True)
    assert set(looks(stopped, clock, STOPPED_SECONDS)) == {None}
    assert looks(stopped, clock, INTERVAL) == [sleeper]


def test_a_process_that_goes_on_is_forgiven(sleeper: int) -> None:
    clock = Clock()
    stopped = StoppedProcesses(lambda: [sleeper], clock)
    for _ in range(3):
        send(sleeper, signal.SIGSTOP, stops=True)
        assert set(looks(stopped, clock, STOPPED_SECONDS)) == {None}
        send(sleeper, signal.SIGCONT, stops=False)
        assert looks(stopped, clock, INTERVAL) == [None]


def test_a_look_after_a_long_time_proves_little(sleeper: int) -> None:
    """The one who looks was stopped as well."""
    clock = Clock()
    stopped = StoppedProcesses(lambda: [sleeper], clock)
    send(sleeper, signal.SIGSTOP, stops=True)
    assert looks(stopped, clock, INTERVAL) == [None]
    clock.now += 3600
    assert stopped.look() is None


def test_between_two_looks_nothing_is_read() -> None:
    clock, asked = Clock(), []
    stopped = StoppedProcesses(lambda: asked.append(clock.now) or [], clock)  # type: ignore[func-returns-value]
    for _ in range(100):
        clock.now += INTERVAL / 50
        stopped.look()
    assert len(asked) == 1 or len(asked) == 2


def test_a_process_that_is_gone_is_not_stopped() -> None:
    clock = Clock()
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert set(looks(StoppedProcesses(lambda: [process.pid], clock), clock, 5.0)) == {None}
