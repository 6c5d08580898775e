"""Ranks that are forked look, end and are found as if they had been started, and no more depends on what forks them.

pytest ci/unit/executor/launchers/test_fork_server.py
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engine import PATIENCE, wait_for_end

from ci.helpers.waiting import until
from inflight.config import EngineConfig
from inflight.distributed.joining import Meeting, OneRank
from inflight.executor.launchers import fork_server
from inflight.executor.launchers.fork_server import ForkServer, can_fork
from inflight.executor.launchers.multiproc import MultiProc
from inflight.executor.launchers.rank_processes import RankProcesses
from inflight.executor.launchers.uniproc import UniProc
from inflight.executor.wire.launch import LAUNCH, RANK

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[ForkServer]:
    started = ForkServer()
    until(lambda: started.is_ready(1.0))
    yield started
    started.close()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of two ranks, of which one alone waits for the other."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return EngineConfig(gpt_model_path=str(tmp_path), tensor_parallel_size=2)


def waiting_rank(config: EngineConfig, server: ForkServer | None) -> RankProcesses:
    return RankProcesses(config, lambda launch: MultiProc(config).commands(launch)[:1], Meeting(), fork_server=server)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def shown(pid: int) -> tuple[list[bytes], dict[bytes, bytes]]:
    """What /proc shows of a process: its arguments, and its environment but what differs from launch to launch."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    items = (item.partition(b"=") for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if item)
    own = (LAUNCH.encode(), b"TMPDIR", b"OPENBLAS_NUM_THREADS")
    return arguments, {name: value for name, _, value in items if name not in own}


def test_a_forked_rank_looks_like_one_that_was_started(config: EngineConfig, server: ForkServer) -> None:
    both = waiting_rank(config, None), waiting_rank(config, server)
    try:
        until(lambda: all(len(processes.pids()) == 1 for processes in both))
        (started,), (forked,) = (processes.pids() for processes in both)
        assert parent_of(forked) != os.getpid() == parent_of(started)
        until(lambda: all(b"inflight.worker" in shown(pid)[0] for pid in (started, forked)))
        assert shown(forked) == shown(started)
        assert shown(forked)[1][RANK.encode()] == b"0"
        assert os.getsid(forked) == forked
    finally:
        for processes in both:
            processes.kill()
    assert not any(processes.pids() for processes in both)


def test_how_a_forked_rank_ended_is_told(tmp_path: Path, config: EngineConfig, server: ForkServer) -> None:
    killed = waiting_rank(config, server)
    until(lambda: killed.pids())
    os.kill(killed.pids()[0], signal.SIGKILL)
    assert killed.wait(PATIENCE)
    assert killed.why_ended(killed.pidfds[0]).endswith("was killed by signal 9")
    killed.kill()
    failed = RankProcesses(
        EngineConfig(gpt_model_path=str(tmp_path / "nothing")), UniProc().commands, OneRank(), fork_server=server
    )
    assert failed.wait(PATIENCE)
    assert str(tmp_path / "nothing") in failed.why_ended(failed.pidfds[0])
    failed.kill()


def test_ranks_end_with_their_server_and_the_next_ones_have_another(config: EngineConfig, server: ForkServer) -> None:
    first = waiting_rank(config, server)
    until(lambda: first.pids())
    (pid,) = first.pids()
    os.kill(parent_of(pid), signal.SIGKILL)
    wait_for_end(pid)
    assert first.why_ended(first.pidfds[0]).endswith("was killed by signal 9")
    first.kill()
    until(lambda: server.is_ready(1.0))
    second = waiting_rank(config, server)
    until(lambda: second.pids())
    second.kill()


def test_ranks_of_a_server_that_does_not_answer_go_on(
    config: EngineConfig, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
    first = waiting_rank(config, server)
    until(lambda: first.pids())
    (pid,) = first.pids()
    silent = parent_of(pid)
    os.kill(silent, signal.SIGSTOP)
    with pytest.raises(OSError, match="did not answer"):
        waiting_rank(config, server)
    until(lambda: server.is_ready(1.0))
    second = waiting_rank(config, server)
    until(lambda: second.pids())
    assert parent_of(second.pids()[0]) != silent
    assert first.pids() == [pid]
    server.close()
    for processes in (first, second):
        until(lambda processes=processes: not processes.pids())  # type: ignore[misc]
        processes.kill()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_answer_that_comes_late_is_not_taken_for_another(
    config: EngineConfig, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is stopped when its rank is to be reaped, and goes on later."""
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
    first = waiting_rank(config, server)
    (pid,) = first.pids()
    silent = parent_of(pid)
    os.kill(silent, signal.SIGSTOP)
    first.kill()
    os.kill(silent, signal.SIGCONT)
    until(lambda: server.is_ready(1.0))
    wait_for_end(silent)  # it has no ranks any more
    monkeypatch.undo()
    second = waiting_rank(config, server)
    (pid,) = second.pids()
    assert children_of(parent_of(pid)) == [pid]
    second.kill()


def test_a_rank_that_cannot_be_watched_is_killed(
    config: EngineConfig, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = waiting_rank(config, server)
    parent = parent_of(first.pids()[0])
    first.kill()

    def without_descriptors(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", without_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        waiting_rank(config, server)
    assert not children_of(parent)


AT_ITS_LIMIT = """
import os, socket, sys
from inflight.executor.rank.fork_server import serve
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
serve(socket.socket(fileno=int(sys.argv[1])))
"""
"""A server that may start no more processes. Root has no such limit."""


def test_why_no_rank_can_be_forked_is_told(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "PROGRAM", ("-c", AT_ITS_LIMIT))
    server = ForkServer()
    until(lambda: server.is_ready(1.0))
    with pytest.raises(OSError, match=r"^a rank cannot be forked: \[Errno 11\] Resource temporarily unavailable$"):
        waiting_rank(config, server)
    server.close()


def test_a_server_that_is_stopped_while_it_imports_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.2)
    server = ForkServer()
    assert not server.is_ready(0.01)
    (stopped,) = (pid for pid in children_of(os.getpid()) if b"inflight.executor.rank.fork_server" in shown(pid)[0])
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(OSError, match="has been stopped by a signal"):
        until(lambda: server.is_ready(0.1))
    wait_for_end(stopped)
    until(lambda: server.is_ready(1.0))
    server.close()


def test_a_server_that_cannot_import_says_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "PROGRAM", ("-c", "raise SystemExit(3)"))
    server = ForkServer()
    with pytest.raises(OSError, match="ended with exit code 3"):
        until(lambda: server.is_ready(1.0))
    server.close()


FRONT = """
import sys
from pathlib import Path
from inflight.config import EngineConfig
from inflight.distributed.joining import Meeting
from inflight.executor.launchers.fork_server import ForkServer
from inflight.executor.launchers.multiproc import MultiProc
from inflight.executor.launchers.rank_processes import RankProcesses
server = ForkServer()
while not server.is_ready(1.0):
    pass
config = EngineConfig(gpt_model_path=sys.argv[1], tensor_parallel_size=2)
first = lambda launch: MultiProc(config).commands(launch)[:1]
processes = RankProcesses(config, first, Meeting(), fork_server=server)
print(*processes.pids(), flush=True)
sys.stdin.read()
"""


def test_neither_server_nor_ranks_outlive_their_front(tmp_path: Path) -> None:
    """A rank that is stopped cannot end by itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FRONT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as front:
        assert front.stdout is not None
        (rank,) = (int(word) for word in front.stdout.readline().split())
        server = parent_of(rank)
        until(lambda: LAUNCH.encode() in Path(f"/proc/{rank}/environ").read_bytes())
        os.kill(rank, signal.SIGSTOP)
        front.kill()
        for pid in (rank, server):
            wait_for_end(pid)


def test_ranks_that_may_use_a_gpu_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tmp_path / "nvidiactl"
    monkeypatch.setattr(fork_server, "NVIDIA_DEVICES", str(devices))
    assert [can_fork(EngineConfig(device=device)) for device in ("cpu", "auto", "cuda")] == [True, True, False]
    devices.touch()
    assert [can_fork(EngineConfig(device=device)) for device in ("cpu", "auto", "cuda")] == [True, False, False]
