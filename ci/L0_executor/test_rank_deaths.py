"""Real ranks that die, freeze or cannot load, with MPI and without it: others take their place, and none is left.

pytest ci/L0_executor/test_rank_deaths.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engine import CHECKPOINT, PATIENCE, Engine, StartEngine, starting, wait_for_end

from inflight.errors import ConfigurationError
from inflight.run_directory import RUN_DIRECTORY

pytestmark = pytest.mark.long

PROMPTS = [[10, 20, 30], list(range(40, 75)), [7], [90, 91, 90, 91, 90, 91]]
LONG, ENDLESS = 200, 900
"""Tokens: of a request that something is done to, which goes on; and of one that must not have ended by then."""


@pytest.fixture(scope="module")
def start() -> Iterator[StartEngine]:
    with starting() as start:
        yield start


@pytest.fixture(scope="module")
def with_mpi(start: StartEngine) -> Engine:
    """Two ranks whose requests end with them, and that may be stopped for long."""
    return start(tensor_parallel_size="2", journal_max_tokens="0", worker_heartbeat_timeout_ms="600000")


@pytest.fixture(scope="module")
def without_mpi(start: StartEngine) -> Engine:
    return start(tensor_parallel_size="2", dtype="float32", executor="multiproc")


def kill(engine: Engine, rank: int) -> None:
    os.kill(engine.rank_pid(rank), signal.SIGKILL)
    assert engine.deaths.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("shared", ["with_mpi", "without_mpi"])
def test_each_rank_that_dies_idle_is_replaced(shared: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(shared)
    before = engine.generate(PROMPTS, 8)
    for rank in (0, 1):
        kill(engine, rank)
        engine.wait_until_ready()
        assert engine.generate(PROMPTS, 8) == before


def test_where_requests_do_not_go_on_a_dead_rank_costs_each_one_error(with_mpi: Engine) -> None:
    """That they do otherwise is shown in test_survival.py."""
    for rank in (0, 1):
        old = set(with_mpi.executor.engine_pids())
        ids = [with_mpi.submit(prompt, ENDLESS, streaming=True) for prompt in PROMPTS]
        with_mpi.wait_for_first(ids)
        kill(with_mpi, rank)
        assert [with_mpi.final(id_).error_code for id_ in ids] == ["UNAVAILABLE"] * len(ids)
        with_mpi.wait_until_ready()
        assert not old & set(with_mpi.executor.engine_pids())
        assert len(with_mpi.generate(PROMPTS, 8)) == len(PROMPTS)


def test_requests_go_on_when_ranks_without_mpi_die(without_mpi: Engine) -> None:
    expected = without_mpi.generate(PROMPTS, LONG, seed=5)
    for rank in (0, 1):
        ids = [without_mpi.submit(prompt, LONG, seed=5, streaming=True) for prompt in PROMPTS]
        without_mpi.wait_for_first(ids)
        kill(without_mpi, rank)
        assert [without_mpi.tokens(id_) for id_ in ids] == expected


@pytest.mark.parametrize(("rank", "executor"), [(0, "mpi"), (1, "multiproc")])
def test_a_stopped_rank_is_replaced(start_engine: StartEngine, rank: int, executor: str) -> None:
    """A follower under MPI is stopped in L0_llm/test_ranks.py."""
    engine = start_engine(tensor_parallel_size="2", executor=executor, worker_heartbeat_timeout_ms="20000")
    expected = engine.generate(PROMPTS[:1], 16)
    frozen = engine.rank_pid(rank)
    os.kill(frozen, signal.SIGSTOP)
    assert [engine.tokens(engine.submit(PROMPTS[0], 16))] == expected
    assert frozen not in engine.executor.engine_pids()


def test_a_rank_that_was_stopped_for_less_goes_on(with_mpi: Engine) -> None:
    expected = with_mpi.generate(PROMPTS[:1], 16)
    follower = with_mpi.rank_pid(1)
    os.kill(follower, signal.SIGSTOP)
    try:
        request_id = with_mpi.submit(PROMPTS[0], 16)
        assert with_mpi.executor.await_responses(timeout=1) == []
    finally:
        os.kill(follower, signal.SIGCONT)
    assert [with_mpi.tokens(request_id)] == expected
    assert not with_mpi.deaths.acquire(blocking=False)


def test_ranks_that_cannot_load_say_why(start_engine: StartEngine, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=missing):
        start_engine(tensor_parallel_size="2", gpt_model_path=missing)


FRONT = """
import sys
from inflight.config import EngineConfig
from inflight.executor.executor import Executor
executor = Executor(config=EngineConfig.from_parameters(dict(item.split("=", 1) for item in sys.argv[1:])))
print(*executor.engine_pids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("executor", ["mpi", "multiproc"])
def test_no_rank_outlives_a_front_that_was_killed(executor: str) -> None:
    ranks = {"executor": executor, "tensor_parallel_size": 2}
    parameters = {"gpt_model_path": CHECKPOINT, **ranks}
    command = [sys.executable, "-c", FRONT, *(f"{key}={value}" for key, value in parameters.items())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        tempfile.TemporaryDirectory(prefix="run-") as run_directory,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, RUN_DIRECTORY: run_directory},
        ) as front,
    ):
        assert front.stdout is not None
        pids = [int(word) for word in front.stdout.readline().split()]
        front.kill()
        assert len(pids) >= 2
        for pid in pids:
            wait_for_end(pid)
