"""The processes of a launch end with it, in whatever state the process that ends them is.

pytest ci/unit/executor/launchers/test_rank_processes.py
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest
from real_engine import CHECKPOINT, rank_pids, wait_for_end

from ci.helpers.waiting import until
from inflight.config import EngineConfig
from inflight.distributed.joining import Meeting, OneRank
from inflight.executor.launchers.multiproc import MultiProc
from inflight.executor.launchers.rank_processes import Command, RankProcesses
from inflight.executor.wire.launch import Launch

pytestmark = pytest.mark.slow

SHELL_WITH_CHILD = ["sh", "-c", "setsid sleep 600 & wait"]
"""Its child is of another session, and is found by its environment alone."""


def start(_launch: Launch) -> list[Command]:
    return [Command(SHELL_WITH_CHILD, os.environ)]


def without_descriptors() -> list[int]:
    """Takes every descriptor that this process may still open."""
    taken = []
    while True:
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return taken


def test_all_are_killed_by_a_process_without_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes = RankProcesses(EngineConfig(gpt_model_path=str(tmp_path)), start, OneRank())
    until(lambda: len(processes.pids()) == 2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    taken = without_descriptors()
    try:
        with pytest.raises(OSError):
            processes.pids()
        processes.kill()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not processes.pids()


def test_a_rank_that_loses_another_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parameters = {"tensor_parallel_size": "2", "max_batch_size": "2", "max_tokens_in_paged_kv_cache": "256"}
    config = EngineConfig.from_parameters({"gpt_model_path": str(CHECKPOINT), **parameters})
    processes = RankProcesses(config, MultiProc(config).commands, Meeting())
    until(processes.launch.socket_path.exists)
    ranks = rank_pids(processes.pids())
    os.kill(ranks[0], signal.SIGKILL)
    wait_for_end(ranks[1])
    processes.kill()
    said = capfd.readouterr().err
    assert f"this rank ends because another one did: process {ranks[0]} of another rank has ended" in said
    assert "Traceback" not in said
