"""Heartbeats: a stub sends them, and the supervisor distinguishes a stub that hangs from one that is busy or gone."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from inflight.run_directory import RUN_DIRECTORY, SIGNS
from inflight.server.threads import sign_thread
from inflight.server.threads.sign_thread import SignThread
from inflight.supervisor import processes
from inflight.supervisor.stub_signs import BUSY_SECONDS, SILENT_SECONDS, StubSigns

LONG = 30.0
"""Seconds after which a wait counts as a hang."""
TICK = 0.5


class Watched:
    """A stub as files and /proc show it, and a supervisor that looks at it twice a second of a clock of our own."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = directory / f"llm_0_0.{os.getpid()}"
        self.cpu_seconds = 100.0
        self._signs, self._now, self._times = StubSigns(directory), 1000.0, itertools.count(10**18, 10**9)
        monkeypatch.setattr(processes, "cpu_seconds", lambda pid: self.cpu_seconds)

    def sign(self) -> None:
        time_ns = next(self._times)
        self.file.touch()
        os.utime(self.file, ns=(time_ns, time_ns))

    def wait(self, seconds: float, *, signs: bool = False, cpu: float = 0.0) -> str | None:
        """The stub that was found to hang in this time. `cpu`: CPU seconds that it uses in each second."""
        for _ in range(int(seconds / TICK)):
            self._now += TICK
            self.cpu_seconds += cpu * TICK
            if signs:
                self.sign()
            if found := self._signs.silent_stub(self._now):
                return found
        return None

    def oversleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_who_gives_signs_is_left_alone(watched: Watched) -> None:
    assert watched.wait(10 * BUSY_SECONDS, signs=True) is None


def test_who_stops_to_give_signs_is_named(watched: Watched) -> None:
    watched.wait(60, signs=True)
    assert watched.wait(SILENT_SECONDS) is None
    assert watched.wait(2 * TICK) == "llm_0_0"


def test_nobody_waits_for_a_stub_that_loads(watched: Watched, tmp_path: Path) -> None:
    tmp_path.rmdir()
    assert watched.wait(10 * BUSY_SECONDS) is None


def test_a_long_call_that_keeps_the_interpreter_is_not_a_standstill(watched: Watched) -> None:
    watched.wait(10, signs=True)
    assert watched.wait(BUSY_SECONDS - TICK, cpu=0.3) is None
    assert watched.wait(10, signs=True) is None


def test_a_call_that_never_ends_is_one(watched: Watched) -> None:
    watched.wait(10, signs=True)
    assert watched.wait(BUSY_SECONDS + 2 * TICK, cpu=1.0) == "llm_0_0"


def test_a_machine_that_slept_excuses_the_silence(watched: Watched) -> None:
    watched.wait(10, signs=True)
    watched.oversleep(3600)
    assert watched.wait(SILENT_SECONDS) is None
    assert watched.wait(10, signs=True) is None


def test_a_date_that_was_set_back_is_a_sign_like_any_other(watched: Watched) -> None:
    watched.wait(10, signs=True)
    os.utime(watched.file, ns=(1, 1))
    assert watched.wait(SILENT_SECONDS) is None
    assert watched.wait(2 * TICK) == "llm_0_0"


def test_a_stub_that_is_gone_is_forgotten_with_its_file(watched: Watched, tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    file = tmp_path / f"llm_0_0.{gone.pid}"
    file.touch()
    assert watched.wait(10 * BUSY_SECONDS) is None and not file.exists()


def test_two_stubs_of_one_name_are_two(watched: Watched, tmp_path: Path) -> None:
    """A model that is loaded in place of itself: the later stub does not speak for the earlier one."""
    (tmp_path / "llm_0_0.1").touch()
    assert watched.wait(2 * SILENT_SECONDS, signs=True) == "llm_0_0"


def test_time_of_a_process_is_that_of_all_its_threads() -> None:
    before = processes.cpu_seconds(os.getpid())

    def work() -> None:
        while processes.cpu_seconds(os.getpid()) < before + 0.05:
            sum(range(10_000))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    monkeypatch.setattr(sign_thread, "PERIOD_SECONDS", 0.001)
    yield tmp_path / SIGNS / f"llm_0_0.{os.getpid()}"
    assert not [thread for thread in threading.enumerate() if thread.name == "inflight-sign"]


def test_a_stub_renews_its_file_until_it_ends(supervised: Path) -> None:
    thread = SignThread("llm_0_0")
    assert not supervised.exists(), "nobody waits for one that has not loaded yet"
    thread.start()
    until(supervised.exists)
    for _ in range(2):
        os.utime(supervised, ns=(0, 0))
        until(lambda: supervised.stat().st_mtime_ns > 0)
    thread.stop()
    assert not supervised.exists()


def test_a_stub_that_cannot_answer_any_more_falls_silent(supervised: Path) -> None:
    asked = threading.Semaphore(0)

    def is_well() -> bool:
        asked.release()
        return False

    thread = SignThread("llm_0_0", is_well)
    thread.start()
    until(supervised.exists)
    os.utime(supervised, ns=(0, 0))
    assert asked.acquire(timeout=LONG) and asked.acquire(timeout=LONG)
    assert supervised.stat().st_mtime_ns == 0
    thread.stop()


def test_a_directory_that_is_gone_ends_the_signs_and_nothing_else(supervised: Path) -> None:
    thread = SignThread("llm_0_0")
    supervised.parent.parent.rmdir()
    thread.start()
    thread.stop()


def test_without_a_supervisor_there_are_no_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIRECTORY, raising=False)
    thread = SignThread("llm_0_0")
    thread.start()
    thread.stop()
    assert not [each for each in threading.enumerate() if each.name == "inflight-sign"]
