"""MPI leader mode: a program that `mpiexec` started leads the job's other processes, which run `inflight.worker`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fake_outer_rank
import leading_program
import pytest

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.launchers.mpi_leader import MpiLeader
from inflight.mpi_launcher import find_launcher, launcher_environment, launcher_options

LIMIT = 300
"""Seconds after which something that should happen counts as never happening."""


def run_job(*words: str, one_host: bool) -> subprocess.CompletedProcess[str]:
    """A job whose rank 0 is a program, by MPICH's gforker if it is for `one_host`, else by its hydra."""
    launcher = find_launcher(Path(sys.executable), one_host=one_host)
    leading = [sys.executable, leading_program.__file__, *words]
    others = [sys.executable, fake_outer_rank.__file__]
    return subprocess.run(
        [str(launcher), *launcher_options(launcher), "-n", "1", *leading, ":", "-n", "1", *others],
        env=launcher_environment(os.environ, one_host=True),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir() or path.parent.name == "jobs"]


@pytest.mark.parametrize("one_host", [True, False])
def test_the_same_ranks_serve_one_launch_after_the_other(user_files: Path, one_host: bool) -> None:
    """A reload: the second launch has another configuration, and the ranks' processes stay."""
    done = run_job("4", "6", one_host=one_host)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["max_batch_size"] for each in told] == [4, 6], done.stderr
    assert told[0]["pids"] == told[1]["pids"]
    assert len(told[0]["pids"]) == 2
    for pid in told[0]["pids"]:
        wait_for_end(pid)
    assert files(user_files) == []


def test_a_rank_that_dies_ends_the_job(user_files: Path) -> None:
    done = run_job("kill", one_host=False)
    assert done.returncode != 0


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"rank process {pid} is still there"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "3"},
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
)
def test_who_does_not_lead_a_job_of_this_size_is_told_how(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"needs an MPI job of 2 processes .* -n 1 python -m inflight.worker"):
        MpiLeader(EngineConfig(tensor_parallel_size=2))
