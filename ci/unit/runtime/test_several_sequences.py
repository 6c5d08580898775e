"""Requests of several sequences on a real network: each has the tokens of a request of its own with its stream's seed.

Run: pytest ci/unit/runtime/test_several_sequences.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec import structs
from tiny_checkpoints import make_checkpoint, make_prompt

from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.scheduler import Scheduler
from inflight.config import EngineConfig, SchedulerPolicy
from inflight.distributed.rank_group import SingleRank
from inflight.errors import RequestError
from inflight.request import OutputConfig, Request, SamplingConfig
from inflight.result import Result
from inflight.runtime.model_runner import ModelRunner
from inflight.sequence_seed import sequence_seed

pytestmark = pytest.mark.slow

BLOCK_SIZE, MAX_SEQ_LEN, NUM_SEQUENCES = 4, 64, 3


class Engine:
    """One GptManager over a real runner, with the results of every sequence."""

    def __init__(
        self, folder: Path, *, policy: SchedulerPolicy, num_blocks: int, max_num_tokens: int, enable_reuse: bool = True
    ) -> None:
        config = EngineConfig(
            gpt_model_path=str(folder),
            device="cpu",
            max_batch_size=6,
            max_num_tokens=max_num_tokens,
            max_seq_len=MAX_SEQ_LEN,
            tokens_per_block=BLOCK_SIZE,
            max_tokens_in_paged_kv_cache=num_blocks * BLOCK_SIZE,
            cpu_compile="false",
        )
        self.runner = ModelRunner.load(config, SingleRank())
        self.kv_cache = KVCacheManager(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, hash_key=b"key", enable_reuse=enable_reuse
        )
        self.scheduler = Scheduler(
            kv_cache=self.kv_cache, max_batch_size=6, max_num_tokens=max_num_tokens, max_seq_len=MAX_SEQ_LEN,
            policy=policy,
        )  # fmt: skip
        self._manager = GptManager(
            runner=self.runner,
            scheduler=self.scheduler,
            callbacks=Callbacks(get_inference_requests=self._get, send_response=self._send),
            limits=self.runner.limits,
        )
        self._queue: list[Request] = []
        self.results: dict[tuple[int, int], list[Result]] = {}
        self.num_paused = 0

    def serve(self, requests: list[Request]) -> None:
        self._queue = list(requests)
        while self._queue or self._manager.num_active_requests:
            self._manager.step()
            self.scheduler.check()
            self.num_paused += self.scheduler.num_paused

    def tokens(self, request_id: int, index: int = 0) -> list[int]:
        return [token for result in self.results[request_id, index] for token in result.output_token_ids]

    def log_probs(self, request_id: int, index: int = 0) -> list[float]:
        return [value for result in self.results[request_id, index] for value in result.log_probs]

    def _get(self, max_num_requests: int) -> list[Request]:
        taken, self._queue = self._queue[:max_num_requests], self._queue[max_num_requests:]
        return taken

    def _send(self, request_id: int, result: Result | None, is_final: bool, error: RequestError | None) -> None:
        assert error is None and result is not None
        self.results.setdefault((request_id, result.sequence_index), []).append(result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3").folder


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
    embedding = engine.runner._decoder.embedding.weight_UD  # type: ignore[attr-defined]
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
