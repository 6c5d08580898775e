"""Two pipeline stages of two ranks each under a real MPI launcher: the tokens of one rank, and what they cost.

That two stages answer requests of every kind as one rank does, also when they die, is shown in test_survival.py.

pytest ci/L0_executor/test_stages.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engine import IDLE_SHARE, PATIENCE, Engine, listening_addresses, wait_until_idle

from inflight.run_directory import RUN_DIRECTORY

PROMPTS = [[10, 20, 30], list(range(40, 75)), [7], [90, 91, 90, 91, 90, 91]]
LONG = 200
"""Tokens: enough that a request is still in flight when something is done to it."""
IDLE_WAKES = 30
"""As in test_idle_and_shared.py, with more ranks."""


@pytest.fixture(scope="module")
def run_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="run-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def four_ranks(run_directory: Path) -> Iterator[Engine]:
    engine = Engine(run_directory, dtype="float32", tensor_parallel_size="2", pipeline_parallel_size="2")
    engine.executor.start()
    yield engine
    engine.executor.shutdown()
    assert not engine.executor.engine_pids()


@pytest.fixture(scope="module")
def expected(run_directory: Path) -> list[list[list[int]]]:
    """Greedy and sampled tokens of one rank, in float32: the order of a sum decides the last digit."""
    one = Engine(run_directory, dtype="float32")
    one.executor.start()
    try:
        return [one.generate(PROMPTS, LONG), one.generate(PROMPTS, 24, seed=5)]
    finally:
        one.executor.shutdown()


def test_two_stages_of_two_ranks_give_the_tokens_of_one_rank(
    four_ranks: Engine, expected: list[list[list[int]]]
) -> None:
    assert [four_ranks.generate(PROMPTS, LONG), four_ranks.generate(PROMPTS, 24, seed=5)] == expected


def test_idle_stages_sleep_and_share_no_port(four_ranks: Engine) -> None:
    four_ranks.generate(PROMPTS, 4)
    pids = four_ranks.executor.engine_pids()
    assert len(pids) >= 5
    assert not {address for pid in pids for address in listening_addresses(pid)}
    wait_until_idle(pids, IDLE_WAKES, IDLE_SHARE)
    assert four_ranks.executor.await_responses(timeout=0) == []


@pytest.mark.parametrize("rank", [1, 2])
def test_streams_go_on_when_a_rank_of_a_stage_is_killed(
    four_ranks: Engine, expected: list[list[list[int]]], rank: int
) -> None:
    ids = [four_ranks.submit(prompt, LONG, streaming=True) for prompt in PROMPTS]
    four_ranks.wait_for_first(ids)
    os.kill(four_ranks.rank_pid(rank), signal.SIGKILL)
    assert [four_ranks.tokens(id_) for id_ in ids] == expected[0]
    assert four_ranks.deaths.acquire(timeout=PATIENCE)
    four_ranks.wait_until_ready()
