"""Layers that keep a state for each sequence, in C++: the bits of a request's log probabilities are those of the
request alone, wherever it starts and whatever runs beside it.

Run: pytest ci/unit/models/test_sequence_states.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_network import needs_compiler
from harness import make_request
from msgspec import structs
from network_engine import Engine
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.config import SchedulerPolicy
from inflight.models.compiled import CompiledNetwork
from inflight.request import Request
from inflight.result import PerfMetrics
from inflight.scheduler_output import SchedulerOutput
from inflight.speculative_decoding import ExternalDraftTokensConfig

pytestmark = pytest.mark.slow

NAMES = ("qwen3_5-wide", "lfm2-wide", "granite-hybrid-wide", "nemotron-h-wide", "falcon-h1-wide", "kimi-linear-wide")
LENGTHS = (1, 8, 9, 21, 30)
"""Of prompts, over blocks of 4 tokens."""
NUM_TOKENS = 20
Answers = dict[tuple[int, int], tuple[list[int], list[float]]]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param, dtype=torch.bfloat16).folder


def requests(**options: Any) -> list[Request]:
    return [
        make_request(number, make_prompt(length, seed=length), NUM_TOKENS, seed=number, log_probs=True, **options)
        for number, length in enumerate(LENGTHS, 1)
    ]


def engine_of(folder: Path, **options: Any) -> Engine:
    usual = {"num_blocks": 120, "max_num_tokens": 64, "policy": SchedulerPolicy.GUARANTEED_NO_EVICT}
    own = {"cpu_compile": "true", "dtype": "bfloat16", "state_snapshot_interval": 8}
    engine = Engine(folder, **{**usual, **own, **options})
    assert isinstance(engine.runner._computation.decoder, CompiledNetwork)
    return engine


def answers_of(engine: Engine) -> Answers:
    return {key: (engine.tokens(*key), engine.log_probs(*key)) for key in engine.results}


def metrics_of(engine: Engine) -> list[PerfMetrics]:
    """Of each request."""
    found = [result.request_perf_metrics for results in engine.results.values() for result in results]
    return [metrics for metrics in found if metrics is not None]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Answers:
    """Each request by itself, its prompt in one step, nothing reused."""
    engine = engine_of(folder, enable_reuse=False)
    for request in requests():
        engine.serve([request])
    engine.runner.close()
    return answers_of(engine)


def in_chunks(folder: Path, alone: Answers) -> Engine:
    engine = engine_of(folder, max_num_tokens=7)
    engine.serve(requests())
    return engine


def paused(folder: Path, alone: Answers) -> Engine:
    engine = engine_of(folder, num_blocks=30, policy=SchedulerPolicy.MAX_UTILIZATION)
    engine.serve(requests())
    assert engine.num_paused > 0
    return engine


def from_snapshots(folder: Path, alone: Answers) -> Engine:
    """The same prompts again, with room for all of their snapshots and those of the answers."""
    engine = engine_of(folder, num_state_snapshots=40)
    engine.serve(requests())
    engine.results.clear()
    engine.serve(requests())
    assert sum(metrics.kv_cache_reused_blocks for metrics in metrics_of(engine)) >= 1 + 2 + 5 + 7
    return engine


def from_host_memory(folder: Path, alone: Answers) -> Engine:
    """Blocks and snapshots for two prompts on the device, which has little of either: the rest is on the host."""
    engine = engine_of(folder, num_blocks=28, num_state_snapshots=4, kv_cache_host_memory_bytes=16 << 20)
    launched: list[SchedulerOutput] = []
    forward = engine.runner.forward
    engine.runner.forward = lambda step: (launched.append(step), forward(step))[1]  # type: ignore[method-assign]
    for _ in range(3):
        for request in requests():
            engine.results.pop((request.request_id, 0), None)
            engine.serve([request])
    assert engine.kv_cache.num_onboarded_blocks > 0
    assert sum(len(step.state_onboards) for step in launched) > len(LENGTHS)
    return engine


def with_drafts(folder: Path, alone: Answers) -> Engine:
    """Right ones, then wrong ones."""
    engine, drafted = engine_of(folder, max_batch_size=32), []
    for request in requests():
        tokens = alone[request.request_id, 0][0]
        tokens = [*tokens[:11], (tokens[11] + 1) % 203, *tokens[12:15]]
        drafted.append(structs.replace(request, external_draft_tokens_config=ExternalDraftTokensConfig(tokens=tokens)))
    engine.serve(drafted)
    assert all(0 < each.total_accepted_draft_tokens < each.total_draft_tokens for each in metrics_of(engine))
    return engine


def without_slots(folder: Path, alone: Answers) -> Engine:
    """As many sequences want their states kept as there are, and one slot."""
    engine = engine_of(folder, num_state_snapshots=1)
    engine.serve(requests())
    return engine


@needs_compiler
@pytest.mark.parametrize("serve", [in_chunks, paused, from_snapshots, from_host_memory, with_drafts, without_slots])
def test_bits_depend_on_the_request_alone(
    folder: Path, alone: Answers, serve: Callable[[Path, Answers], Engine]
) -> None:
    engine = serve(folder, alone)
    engine.runner.close()
    assert answers_of(engine) == alone
    assert engine.kv_cache.num_used_blocks == 0


@needs_compiler
def test_texts_that_go_on_start_behind_the_answer(folder: Path) -> None:
    """A second turn finds all full blocks of the first, of its output too."""
    engine = engine_of(folder)
    [first] = requests()[-1:]
    engine.serve([first])
    text = [*first.input_token_ids, *engine.tokens(first.request_id), *make_prompt(3, seed=9)]
    second = make_request(50, text, 8, log_probs=True)
    engine.serve([second])
    engine.runner.close()
    found = answers_of(engine)[50, 0]
    metrics = metrics_of(engine)[-1]
    assert metrics.num_cached_tokens == (len(first.input_token_ids) + NUM_TOKENS - 1) // 4 * 4
    fresh = engine_of(folder, enable_reuse=False)
    fresh.serve([second])
    fresh.runner.close()
    assert found == answers_of(fresh)[50, 0]
