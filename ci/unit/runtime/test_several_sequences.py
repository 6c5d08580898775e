"""Requests of several sequences on a real network: each has the tokens of a request of its own with its stream's seed.

Run: pytest ci/unit/runtime/test_several_sequences.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs
from network_engine import Engine
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.batch_manager.callbacks import Callbacks
from inflight.config import SchedulerPolicy
from inflight.errors import RequestError
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.sampling_config import SamplingConfig
from inflight.sequence_seed import sequence_seed

pytestmark = pytest.mark.slow

NUM_SEQUENCES = 3


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"], ids=["keys and values", "states of sequences"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param).folder


def make_requests() -> list[Request]:
    """Prompts that end within a block, at its end and at its beginning; greedy, sampled, penalised, with bad words."""
    samplings = [
        SamplingConfig(temperature=0.9, seed=5),
        SamplingConfig(),
        SamplingConfig(temperature=1.0, top_k=40, seed=6, repetition_penalty=1.3, frequency_penalty=0.2),
        SamplingConfig(temperature=0.8, top_p=0.9, seed=2**64 - 1),
    ]
    return [
        Request(
            request_id=1 + number,
            input_token_ids=make_prompt(length, seed=number),
            max_tokens=12,
            sampling_config=samplings[number % len(samplings)],
            output_config=OutputConfig(return_log_probs=True),
            bad_words=[[7], [9, 11]] if number % 2 else [],
            num_return_sequences=NUM_SEQUENCES,
        )
        for number, length in enumerate((1, 7, 8, 9, 18, 21))
    ]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """Each sequence of each request as a request of its own, one after the other, without any reuse."""
    engine = Engine(
        folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=64, max_num_tokens=64, enable_reuse=False
    )
    found = {}
    for request in make_requests():
        for index in range(NUM_SEQUENCES):
            sampling = request.sampling_config
            sampling = structs.replace(sampling, seed=sequence_seed(sampling.seed, index))
            single = structs.replace(request, request_id=1, sampling_config=sampling, num_return_sequences=1)
            engine.results.clear()
            engine.serve([single])
            found[request.request_id, index] = engine.tokens(1), engine.log_probs(1)
    engine.runner.close()
    return found


@pytest.mark.parametrize("enable_reuse", [True, False])
@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [
        (SchedulerPolicy.GUARANTEED_NO_EVICT, 64),
        (SchedulerPolicy.STATIC_BATCH, 64),
        (SchedulerPolicy.MAX_UTILIZATION, 14),
    ],
)
def test_each_sequence_has_the_tokens_of_a_request_of_its_own(
    folder: Path,
    alone: dict[tuple[int, int], tuple[list[int], list[float]]],
    policy: SchedulerPolicy,
    num_blocks: int,
    enable_reuse: bool,
) -> None:
    """Prompts are chunked, shared and copied, and with MAX_UTILIZATION sequences are paused."""
    engine = Engine(folder, policy=policy, num_blocks=num_blocks, max_num_tokens=10, enable_reuse=enable_reuse)
    engine.serve(make_requests())
    for (request_id, index), (tokens, log_probs) in alone.items():
        assert engine.tokens(request_id, index) == tokens, (request_id, index)
        assert engine.log_probs(request_id, index) == pytest.approx(log_probs, abs=1e-4)
    assert (engine.num_paused > 0) == (policy is SchedulerPolicy.MAX_UTILIZATION)
    assert engine.kv_cache.num_used_blocks == 0
    engine.runner.close()


def test_sampled_sequences_differ_and_greedy_ones_are_equal(
    alone: dict[tuple[int, int], tuple[list[int], list[float]]],
) -> None:
    for request in make_requests():
        outputs = {tuple(alone[request.request_id, index][0]) for index in range(NUM_SEQUENCES)}
        assert len(outputs) == (NUM_SEQUENCES if request.sampling_config.temperature else 1)


def test_a_prompt_that_gives_nan_is_one_error_and_leaves_the_memory_clean(folder: Path) -> None:
    engine = Engine(folder, policy=SchedulerPolicy.GUARANTEED_NO_EVICT, num_blocks=16, max_num_tokens=16)
    errors: list[RequestError | None] = []
    engine._send = lambda request_id, result, is_final, error: errors.append(error)  # type: ignore[method-assign]
    engine._manager._callbacks = Callbacks(get_inference_requests=engine._get, send_response=engine._send)
    embedding = engine.runner._computation.decoder.embedding.weight_UD  # type: ignore[attr-defined]
    poisoned = Request(request_id=1, input_token_ids=[3, 4, 5, 6, 7, 8], max_tokens=8, num_return_sequences=3)
    with torch.inference_mode():
        kept = embedding[5].clone()
        embedding[5] = float("nan")
        engine.serve([poisoned])
        embedding[5] = kept
    assert len(errors) == 1 and "not finite" in str(errors[0])
    assert engine.kv_cache.num_used_blocks == 0
    errors.clear()
    fine = [Request(request_id=2 + n, input_token_ids=[n, 1, 2], max_tokens=40, num_return_sequences=2) for n in (1, 2)]
    engine.serve(fine)
    assert errors and not any(errors)
    engine.runner.close()
