"""The janitor as a process, with programs that play a server."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import output_pipe, processes
from inflight.supervisor.janitor import SERVING
from inflight.supervisor.janitor_process import JANITOR, JanitorProcess
from inflight.supervisor.output_pipe import OutputPipe
from inflight.supervisor.process_id import ProcessId
from inflight.supervisor.shared_memory import SHARED_MEMORY

pytestmark = pytest.mark.slow

PATIENCE = 120.0
MORE_THAN_A_PIPE = 300_000


class PlayedServer:
    """A run directory with a janitor, and a program that belongs to it."""

    def __init__(self, folder: Path) -> None:
        # Longer than the address of a socket may be.
        self.run_directory = folder / ("long" * 30)
        self.run_directory.mkdir(mode=0o700)
        self.prefix = f"inflight_test_{os.getpid()}_{threading.get_native_id()}_"
        self.log_file = folder / "log"
        self.told: list[str] = []
        self.pipe = OutputPipe(self.run_directory, output_pipe.TRITONSERVER)
        self.pipe.make()
        self.region = SHARED_MEMORY / f"{self.prefix}region"
        self.supervisors: list[JanitorProcess] = []

    def supervisor(self, adopt_timeout: float = PATIENCE) -> JanitorProcess:
        made = JanitorProcess(
            self.run_directory,
            self.prefix,
            adopt_timeout=adopt_timeout,
            log_file=self.log_file,
            tell=self.told.append,
        )
        self.supervisors.append(made)
        return made

    def serve(self, program: str = "exec sleep 600") -> subprocess.Popen[bytes]:
        self.region.touch()
        (self.run_directory / SERVING).touch()
        reader = self.pipe.open_reader()
        with open(self.pipe.open_writer(), "wb") as printed:
            environment = {**os.environ, RUN_DIRECTORY: str(self.run_directory)}
            self.process = subprocess.Popen(["sh", "-c", program], stdout=printed, env=environment)
        os.close(reader)
        return self.process

    @property
    def janitor_pid(self) -> int:
        found = ProcessId.read(self.run_directory / JANITOR)
        assert found is not None
        return found.pid

    def is_gone(self) -> bool:
        return not self.run_directory.exists() and not self.region.exists() and self.process.poll() is not None


def die(supervisor: JanitorProcess) -> None:
    """As a killed process does: its connection ends without a word, and its lock is given back."""
    assert supervisor._connection is not None and supervisor._lock is not None
    supervisor._connection.close()
    supervisor._lock.release()
    supervisor._connection = supervisor._lock = None


@pytest.fixture
def server() -> Iterator[PlayedServer]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        played = PlayedServer(Path(folder))
        yield played
        for supervisor in played.supervisors:
            supervisor.end()


def test_in_the_end_nothing_is_left(server: PlayedServer) -> None:
    with server.supervisor().attending():
        server.serve()
    assert server.is_gone()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no option for it")
def test_nothing_is_imported_from_where_it_is_started(server: PlayedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = server.run_directory.parent
    (folder / "json.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(folder)
    with server.supervisor().attending():
        server.serve()
    assert server.is_gone()


def test_a_server_that_did_not_serve_yet_ends_with_its_supervisor(server: PlayedServer) -> None:
    supervisor = server.supervisor()
    supervisor.start()
    server.serve()
    (server.run_directory / SERVING).unlink()
    die(supervisor)
    until(server.is_gone)


def test_one_that_nobody_adopts_in_time_is_ended(server: PlayedServer) -> None:
    supervisor = server.supervisor(adopt_timeout=0.1)
    supervisor.start()
    server.serve()
    die(supervisor)
    until(server.is_gone)


def test_one_without_a_supervisor_goes_on_and_prints_whatever_it_likes(server: PlayedServer) -> None:
    first = server.supervisor()
    first.start()
    printed = server.run_directory.parent / "printed"
    server.serve(f"head -c {MORE_THAN_A_PIPE} /dev/zero; touch {printed}; exec sleep 600")
    assert not printed.exists()
    die(first)
    until(printed.exists)
    until(lambda: server.log_file.exists() and server.log_file.stat().st_size == MORE_THAN_A_PIPE)
    assert stat.S_IMODE(server.log_file.stat().st_mode) == 0o600
    next_one = server.supervisor()
    assert next_one.adopt()
    assert server.process.poll() is None
    next_one.end()
    assert server.is_gone()


def test_there_is_one_supervisor_at_a_time(server: PlayedServer) -> None:
    first, second = server.supervisor(), server.supervisor()
    first.start()
    server.serve()
    assert not second.adopt()
    die(first)
    assert second.adopt()
    assert not first.adopt()
    second.end()
    assert server.is_gone()


def test_who_says_something_else_is_no_supervisor(server: PlayedServer) -> None:
    first = server.supervisor()
    first.start()
    server.serve()
    die(first)
    for words in (b"{}", b"[]", b"null"):
        stranger = server.supervisor()
        stranger._hello = words
        assert not stranger.adopt()
    assert server.supervisor().adopt()


def test_a_killed_janitor_is_replaced(server: PlayedServer) -> None:
    supervisor = server.supervisor()
    supervisor.start()
    server.serve()
    before = server.janitor_pid
    os.kill(before, signal.SIGKILL)
    until(lambda: supervisor.keep_up() or server.janitor_pid != before)
    assert server.told == ["the janitor ended; starting another one"]
    die(supervisor)
    assert server.supervisor().adopt()


ABANDONABLE = """
import pathlib, sys, time
from inflight.abandonment import end_when_abandoned
end_when_abandoned()
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_what_is_left_when_supervisor_and_janitor_are_killed_ends_by_itself(
    server: PlayedServer, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(ABANDONABLE)
    programs = [f"{sys.executable} {tmp_path}/program.py {tmp_path}/{number}" for number in range(2)]
    first = server.supervisor()
    first.start()
    server.serve(f"{programs[0]} & {programs[1]} & exec sleep 600")
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    everything = processes.marked(server.run_directory)
    # One of them is enough, whoever comes and goes.
    die(first)
    second = server.supervisor()
    assert second.adopt()
    janitor = server.janitor_pid
    os.kill(janitor, signal.SIGKILL)
    until(lambda: second.keep_up() or server.janitor_pid != janitor)
    assert all(map(processes.is_alive, everything))
    os.kill(server.janitor_pid, signal.SIGKILL)
    die(second)
    until(server.is_gone)
    assert not any(map(processes.is_alive, everything))


def test_sigterm_ends_a_server_only_if_it_has_no_supervisor(server: PlayedServer) -> None:
    supervisor = server.supervisor()
    supervisor.start()
    server.serve()
    os.kill(server.janitor_pid, signal.SIGTERM)
    supervisor.keep_up()
    assert server.told == [] and server.process.poll() is None
    die(supervisor)
    janitor = server.janitor_pid

    def is_ended() -> bool:
        os.kill(janitor, signal.SIGTERM)  # it may not have noticed yet
        return server.is_gone()

    until(is_ended)
