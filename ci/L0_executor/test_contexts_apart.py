"""Replicas for prompts and replicas that generate, of two ranks each: every rank fetches its part, and nothing is left.

pytest ci/L0_executor/test_contexts_apart.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from calls import until
from real_engine import Engine, listening_addresses, rank_pids

from inflight import backoff
from inflight.run_directory import RUN_DIRECTORY

PROMPTS = [[10, 20, 30], list(range(40, 140)), [7, 8], [90, 91] * 20, list(range(200, 217))]
CONTEXT, GENERATION = 0, 1
LONG = 200
"""Tokens: enough that a request is still in flight when a rank is killed."""


@pytest.fixture(scope="module")
def run_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="run-") as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, path)
        patch.setattr(backoff, "LONGEST", 0.0)
        yield Path(path)
        assert not [each.name for each in Path(path).iterdir() if each.name.startswith("engine-")]


@pytest.fixture(scope="module")
def apart(run_directory: Path) -> Iterator[Engine]:
    engine = Engine(
        run_directory,
        dtype="float32",
        executor="multiproc",
        tensor_parallel_size="2",
        data_parallel_size="2",
        context_replicas="1",
        max_tokens_in_buffer="1024",
    )
    engine.executor.start()
    yield engine
    engine.executor.shutdown()
    assert engine.executor.engine_pids() == []


@pytest.fixture(scope="module")
def expected(run_directory: Path) -> dict[int | None, list[list[int]]]:
    """Tokens of all prompts, greedy and sampled."""
    engine = Engine(run_directory, dtype="float32")
    engine.executor.start()
    try:
        return {seed: engine.generate(PROMPTS, LONG, seed) for seed in (None, 5)}
    finally:
        engine.executor.shutdown()


def num_prompts_kept(engine: Engine) -> int:
    """In memory of all ranks: files that they hold open, and those that they have mapped."""
    found = 0
    for pid in engine.executor.engine_pids():
        with suppress(OSError):  # it has ended
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    found += "inflight-prompt" in os.readlink(each)
            found += Path(f"/proc/{pid}/maps").read_text().count("inflight-prompt")
    return found


def ranks_of(engine: Engine, replica: int) -> dict[int, int]:
    return rank_pids(engine.executor._connections[replica].pids())


def wait_until_all_ready(engine: Engine) -> None:
    changed = engine.executor._changed
    with changed:
        assert changed.wait_for(lambda: all(engine.executor.ready_replicas()), 120)


def test_tokens_are_those_of_one_rank(apart: Engine, expected: dict[int | None, list[list[int]]]) -> None:
    num_before = apart.executor.num_handovers()
    for seed, tokens in expected.items():
        streams = [apart.submit(prompt, LONG, seed, streaming=True) for prompt in PROMPTS]
        assert apart.generate(PROMPTS, LONG, seed) == tokens
        assert [apart.tokens(id_) for id_ in streams] == tokens
    assert apart.executor.num_handovers() == num_before + 4 * len(PROMPTS)
    until(lambda: num_prompts_kept(apart) == 0, "all was fetched and used")


@pytest.mark.parametrize(("replica", "rank"), [(CONTEXT, 1), (GENERATION, 0)])
def test_streams_go_on_when_a_rank_of_either_dies(
    apart: Engine, expected: dict[int | None, list[list[int]]], replica: int, rank: int
) -> None:
    wait_until_all_ready(apart)
    streams = [apart.submit(prompt, LONG, 5, streaming=True) for prompt in PROMPTS]
    apart.wait_for_first(streams[:1])
    later = [apart.submit(prompt, LONG, 5) for prompt in PROMPTS]
    os.kill(ranks_of(apart, replica)[rank], signal.SIGKILL)
    for ids in (streams, later):
        assert [apart.tokens(id_) for id_ in ids] == expected[5]
    wait_until_all_ready(apart)
    assert apart.generate(PROMPTS, LONG, None) == expected[None]
    until(lambda: num_prompts_kept(apart) == 0, "what the dead had asked for is dropped in time")


def test_nobody_listens_beyond_loopback(apart: Engine) -> None:
    for pid in apart.executor.engine_pids():
        assert listening_addresses(pid) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
