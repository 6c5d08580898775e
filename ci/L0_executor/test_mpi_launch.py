"""How ranks are launched under MPI and without it, with ranks whose runner is a fake: only the launch is tested."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_rank
import psutil
import pytest
from calls import Caller

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.mpi import Mpi
from inflight.executor.launchers.multiproc import MultiProc
from inflight.executor.launchers.processes import ProcessLauncher
from inflight.mpi_launcher import find_launcher
from inflight.python_command import find_python

pytestmark = pytest.mark.long

LONG = fake_rank.MAX_SEQ_LEN - 100

several_ways = pytest.mark.parametrize("executor", ["mpi", "multiproc"])

StartRanks = Callable[..., RemoteFront]


@pytest.fixture
def start_ranks() -> Iterator[StartRanks]:
    executors: list[RemoteFront] = []

    def start(size: int = 2, mpiexec: Path | None = None, keep_trying: bool = True, **config: Any) -> RemoteFront:
        engine_config = EngineConfig(tensor_parallel_size=size, max_batch_size=4, max_num_tokens=64, **config)
        way: Mpi | MultiProc = Mpi(engine_config, mpiexec=mpiexec, program=[fake_rank.__file__])
        if engine_config.executor == "multiproc":
            way = MultiProc(engine_config, [fake_rank.__file__])
        executor = RemoteFront(engine_config, ProcessLauncher(engine_config, way), keep_trying=keep_trying)
        executors.append(executor)
        executor.start()
        return executor

    yield start
    for executor in executors:
        executor.shutdown()
        assert executor.engine_pids() == []


@several_ways
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_stay_in_step_whatever_comes_and_goes(start_ranks: StartRanks, size: int, executor: str) -> None:
    caller = Caller(start_ranks(size, executor=executor))
    cancelled = caller.send(*(caller.request([n], LONG, streaming=True) for n in range(3)))
    caller.wait_for_tokens(cancelled[2])
    for request_id in cancelled:
        caller.executor.cancel_request(request_id)
    caller.serve(*(caller.request([n, n + 1], 1 + n % 23, streaming=n % 3 == 0) for n in range(60)))
    caller.wait(*cancelled)
    caller.serve(caller.request(200, 40))


@several_ways
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_one_rank_alone_ends_all_ranks_and_no_request(
    start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch, executor: str, rank: int
) -> None:
    monkeypatch.setenv(fake_rank.CRASH, f"{rank},20")
    front = start_ranks(executor=executor)
    monkeypatch.delenv(fake_rank.CRASH)  # the next ranks have no such fault
    caller = Caller(front)
    caller.serve(*(caller.request([n], 60) for n in range(6)))
    assert 0 < front.num_replays() <= 6, "of those that had been sent by then"


@several_ways
def test_a_failure_on_load_is_told_in_its_own_sentence(
    start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    monkeypatch.setenv(fake_rank.FAILURE, "gpt_model_path: nothing there")
    with pytest.raises(ConfigurationError, match=r"^gpt_model_path: nothing there$"):
        start_ranks(executor=executor)


def test_ranks_that_end_before_they_join_are_told(start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # no interpreter starts with it
    with pytest.raises(ConfigurationError, match=r"the engine's 2 ranks did not find each other: .* exit code 1"):
        start_ranks(executor="multiproc")


def test_a_launcher_of_another_mpi_is_named(start_ranks: StartRanks, tmp_path: Path) -> None:
    """What such a launcher does: it starts the processes, and none of them learns of the others."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text('#!/bin/sh\n[ "$1" = -n ] || exit 0\nshift 2\n"$@" &\n"$@" &\nwait\n')
    launcher.chmod(0o700)
    with pytest.raises(ConfigurationError, match="2 ranks were launched but each finds itself in a group of 1"):
        start_ranks(mpiexec=launcher)


def test_a_launcher_that_fails_is_named(start_ranks: StartRanks, tmp_path: Path) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text("#!/bin/sh\nexit 3\n")
    launcher.chmod(0o700)
    with pytest.raises(ConfigurationError, match=f"exit code 3.*{launcher}.*belong to mpi4py's MPI"):
        start_ranks(mpiexec=launcher)


def test_an_outer_mpi_job_does_not_confuse_ours(start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"PMI_RANK": "5", "PMI_SIZE": "9", "PMI_FD": "77", "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "9"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    caller = Caller(start_ranks())
    caller.serve(caller.request())


@several_ways
def test_ranks_share_nothing_with_a_name(start_ranks: StartRanks, executor: str) -> None:
    """No port, and no shared memory that would stay behind when ranks are killed."""
    pids = start_ranks(executor=executor).engine_pids()
    assert len(pids) == (2 if executor == "multiproc" else 3)
    for pid in pids:
        assert psutil.Process(pid).net_connections("inet") == []
        links = [_target(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        named = [link for link in links if link.startswith("/dev/shm/") and not link.endswith("(deleted)")]
        assert named == []


def test_the_common_launcher_serves_too(start_ranks: StartRanks) -> None:
    hydra = find_launcher(find_python(), one_host=False)
    caller = Caller(start_ranks(mpiexec=hydra))
    caller.serve(caller.request())


def test_a_hostfile_is_passed_on(start_ranks: StartRanks, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{socket.gethostname()}:2\n")
    caller = Caller(start_ranks(mpi_hostfile=str(hostfile)))
    caller.serve(caller.request())


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
