"""The loop, the scheduler and the runner together: memory is short, prompts share beginnings, requests join and leave.

Whatever is shared, chunked or paused on the way, a request's tokens are those it gets alone, and greedy ones are
transformers'. Run: pytest ci/unit/runtime/test_engine.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from replays import replay_after
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_prompt

from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.scheduler import Scheduler
from inflight.batch_manager.state_slots import StateSlots
from inflight.config import EngineConfig, SchedulerPolicy
from inflight.distributed.rank_group import SingleRank
from inflight.errors import RequestError
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.result import Result
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.step_handle import StepHandle
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import SchedulerOutput

pytestmark = pytest.mark.slow

MAX_BATCH_SIZE, MAX_NUM_TOKENS, BLOCK_SIZE, MAX_SEQ_LEN, NUM_NEW = 6, 16, 4, 80, 14
NUM_BLOCKS = 26
"""Room for three or four of the requests below, which makes MAX_UTILIZATION pause some of them."""


class CountingRunner(ModelRunner):
    """Counts how often a sequence takes a row: once each, and once more for every pause."""

    num_starts = 0

    def forward(self, scheduled: SchedulerOutput) -> StepHandle:
        self.num_starts += len(scheduled.new_sequences)
        return super().forward(scheduled)


class Engine:
    """One GptManager over a real runner; its queue is a list."""

    def __init__(self, folder: Path, policy: SchedulerPolicy) -> None:
        config = EngineConfig(
            gpt_model_path=str(folder),
            device="cpu",
            max_batch_size=MAX_BATCH_SIZE,
            max_num_tokens=MAX_NUM_TOKENS,
            max_seq_len=MAX_SEQ_LEN,
            tokens_per_block=BLOCK_SIZE,
            max_tokens_in_paged_kv_cache=NUM_BLOCKS * BLOCK_SIZE,
            cpu_compile="false",
        )
        self.runner = CountingRunner.load(config, SingleRank())
        self.kv_cache = KVCacheManager(
            num_blocks=self.runner.num_blocks,
            block_size=BLOCK_SIZE,
            hash_key=b"key",
            state_slots=StateSlots.beside_rows(config.max_batch_size, self.runner.num_snapshots),
            state_interval=2 * BLOCK_SIZE,
        )
        self.scheduler = Scheduler(
            kv_cache=self.kv_cache,
            max_batch_size=MAX_BATCH_SIZE,
            max_num_tokens=MAX_NUM_TOKENS,
            max_seq_len=MAX_SEQ_LEN,
            policy=policy,
        )
        callbacks = Callbacks(get_inference_requests=self._get, send_response=self._send)
        self._manager = GptManager(
            runner=self.runner, scheduler=self.scheduler, callbacks=callbacks, limits=self.runner.limits
        )
        self._queue: list[Request] = []
        self._tokens: dict[int, list[int]] = {}
        self.finals: dict[int, Result] = {}

    def serve(self, requests: list[Request]) -> list[list[int]]:
        self._queue = list(requests)
        self.runner.num_starts = 0
        self._tokens = {request.request_id: [] for request in requests}
        while True:
            self._manager.step()
            self.scheduler.check()
            if not self._queue and not self._manager.num_active_requests:
                return [self._tokens[request.request_id] for request in requests]

    def _get(self, max_num_requests: int) -> list[Request]:
        """Two at a time, so that requests join while others run."""
        count = min(max_num_requests, 2)
        taken, self._queue = self._queue[:count], self._queue[count:]
        return taken

    def _send(self, request_id: int, result: Result | None, is_final: bool, error: RequestError | None) -> None:
        assert error is None
        if result is not None:
            self._tokens[request_id] += result.output_token_ids
            if is_final:
                self.finals[request_id] = result


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"], ids=["keys and values", "states of sequences"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def greedy(checkpoint: TinyCheckpoint) -> list[tuple[list[int], list[int]]]:
    return [checkpoint.prompt(length, NUM_NEW) for length in (2, 9, 15, 27, 31, 8)]


def make_requests(greedy: list[tuple[list[int], list[int]]]) -> list[Request]:
    """Every greedy prompt twice, so that the second finds the first's blocks, between seeded and penalised ones."""
    shared = make_prompt(17, seed=4)
    requests = []
    for index, (prompt, _) in enumerate([*greedy, *greedy]):
        requests.append(Request(request_id=2 * index, input_token_ids=prompt, max_tokens=NUM_NEW, streaming=True))
        sampling = SamplingConfig(temperature=0.8, top_p=0.95, seed=index, repetition_penalty=1 + index % 2 * 0.2)
        requests.append(
            Request(
                request_id=2 * index + 1,
                input_token_ids=shared + make_prompt(index, seed=5),
                max_tokens=NUM_NEW,
                sampling_config=sampling,
                bad_words=[[index], [3, 4]],
            )
        )
    return requests


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
def test_every_request_gets_its_own_tokens(
    checkpoint: TinyCheckpoint, greedy: list[tuple[list[int], list[int]]], policy: SchedulerPolicy
) -> None:
    engine = Engine(checkpoint.folder, policy)
    requests = make_requests(greedy)
    together = engine.serve(requests)
    assert together[::2] == [tokens for _, tokens in greedy] * 2
    assert (engine.runner.num_starts > len(requests)) == (policy is SchedulerPolicy.MAX_UTILIZATION)
    assert engine.kv_cache.num_reused_blocks > 0
    assert engine.kv_cache.num_used_blocks == 0
    engine.runner.close()
    alone = Engine(checkpoint.folder, SchedulerPolicy.GUARANTEED_NO_EVICT)
    assert [alone.serve([request])[0] for request in requests[1::2]] == together[1::2]
    alone.runner.close()


def replays(prompt: list[int]) -> list[Request]:
    """Requests in which what was generated before matters for what comes after."""
    sampled = SamplingConfig(temperature=0.9, top_p=0.9, seed=11)
    penalised = SamplingConfig(temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=9)
    configs = [SamplingConfig(), sampled, penalised, SamplingConfig(min_tokens=6, presence_penalty=0.8)]
    return [
        Request(
            request_id=number,
            input_token_ids=prompt,
            max_tokens=NUM_NEW,
            sampling_config=sampling,
            output_config=OutputConfig(return_log_probs=True),
            end_ids=list(range(0, 200, 9)),
            bad_words=[[number], [3, 4], [17, 40]],
        )
        for number, sampling in enumerate(configs)
    ]


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_a_request_goes_on_from_the_tokens_that_its_client_has(checkpoint: TinyCheckpoint, cut: int) -> None:
    """Greedy and sampled, with penalties, bad words, min_tokens and max_tokens: the tokens and their log probabilities
    are those of the run that nothing disturbed."""
    requests = replays(make_prompt(11, seed=9))
    undisturbed = Engine(checkpoint.folder, SchedulerPolicy.GUARANTEED_NO_EVICT)
    outputs = undisturbed.serve(requests)
    undisturbed.runner.close()
    again = Engine(checkpoint.folder, SchedulerPolicy.GUARANTEED_NO_EVICT)
    cuts = [min(cut, len(output) - 1) for output in outputs]
    assert sum(cuts) > 0
    replayed = []
    for request, output, count in zip(requests, outputs, cuts, strict=True):
        log_probs = undisturbed.finals[request.request_id].log_probs[:count]
        replay = replay_after(output[:count], cum_log_prob=sum(log_probs))
        replayed.append(structs.replace(request, replay=replay))
    assert again.serve(replayed) == [output[count:] for output, count in zip(outputs, cuts, strict=True)]
    again.runner.close()
    for request, count in zip(requests, cuts, strict=True):
        before, after = undisturbed.finals[request.request_id], again.finals[request.request_id]
        assert after.finish_reason is before.finish_reason
        assert after.cum_log_prob == pytest.approx(before.cum_log_prob, abs=1e-4)
        assert after.log_probs == pytest.approx(before.log_probs[count:], abs=1e-4)
