"""Ranks are killed while requests of every kind are in flight: each goes on, and its client gets what it gets alone.
To the last bit of every number, where C++ computes.

pytest ci/L0_executor/test_survival.py
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import request_kinds
from mortal_front import MortalFront, assert_same
from request_kinds import ADAPTERS, CHECKPOINT, ENGINE, KINDS, TOKENIZER, RequestKind
from waiting import until

from inflight import backoff
from inflight.config import EngineConfig
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.output_config import OutputConfig
from inflight.run_directory import RUN_DIRECTORY
from inflight.sampling_config import SamplingConfig
from inflight_kernels.cpu import unsupported_reason

pytestmark = pytest.mark.long

SAMPLED = SamplingConfig(temperature=1.0, seed=3)
MORE_KINDS = (
    RequestKind(feature="stop string", fields={"stop": ["very big", "dog's n"], "max_tokens": 40}),
    RequestKind(
        feature="several sequences with stop strings",
        fields={"stop": ["a", "!"], "num_return_sequences": 3, "sampling_config": SAMPLED, "max_tokens": 40},
    ),
    RequestKind(feature="all tokens each time", fields={"return_all_generated_tokens": True}),
    RequestKind(
        feature="long",
        fields={
            "max_tokens": 150,
            "sampling_config": SAMPLED,
            "output_config": OutputConfig(return_log_probs=True, num_log_probs=3),
        },
    ),
)
ALL = (*KINDS, *MORE_KINDS)
TRIES = 5
"""Until deaths have met requests."""


class Scene:
    def __init__(self, num_ranks: int, num_stages: int, num_replicas: int, num_for_contexts: int = 0) -> None:
        """Each stage of a replica has `num_ranks`. What stages must give is what one rank gives, and so must replicas
        of which some are for contexts; others are compared with what they give alone."""
        self.is_exact = not unsupported_reason()
        self.kinds = [kind for kind in ALL if num_stages == 1 or kind.feature != "draft model"]
        options = {key: value for key, value in ENGINE.items() if num_stages == 1 or "speculative" not in key}
        config = EngineConfig(
            gpt_model_path=str(CHECKPOINT),
            device="cpu",
            dtype="bfloat16" if self.is_exact else "float32",
            cpu_compile="true" if self.is_exact else "false",
            num_threads=1,
            tensor_parallel_size=num_ranks,
            data_parallel_size=num_replicas,
            pipeline_parallel_size=num_stages,
            context_replicas=num_for_contexts,
            max_tokens_in_buffer=4096 if num_for_contexts else 0,
            logits_post_processor_replicate=num_stages == 1,
            max_batch_size=8,
            max_tokens_in_paged_kv_cache=4096,
            max_loras=2,
            lora_dir=str(ADAPTERS),
            log_level="WARNING",
            **options,
        )
        self.num_ranks = config.num_ranks
        self.num_replicas = num_replicas
        self.front = MortalFront(config)
        self.service = GenerationExecutor(self.front, TOKENIZER)
        self.alone: dict[str, GenerationResult] = {}
        for kind in self.kinds:
            self.alone[kind.feature] = self.start(kind, streaming=True)
            self.alone[kind.feature].result()
        self.num_responses = self.front.num_delivered
        if num_stages > 1 or num_for_contexts:
            self.check(list(of_one_rank(config, self.kinds).items()))

    def start(self, kind: RequestKind, **changes: bool) -> GenerationResult:
        return self.service.generate_async(kind.prompt, **{**kind.python(), **changes})

    def serve(self) -> list[tuple[str, GenerationResult]]:
        """All kinds at once, streamed and not."""
        kinds = [(kind, streaming) for kind in self.kinds for streaming in (True, False)]
        random.Random(len(kinds)).shuffle(kinds)
        return [(kind.feature, self.start(kind, streaming=streaming)) for kind, streaming in kinds]

    def check(self, results: list[tuple[str, GenerationResult]]) -> None:
        for feature, result in results:
            assert_same(result, self.alone[feature], feature, exact=self.is_exact)


def of_one_rank(config: EngineConfig, kinds: list[RequestKind]) -> dict[str, GenerationResult]:
    one = replace(config, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, context_replicas=0)
    with GenerationExecutor(InProcessExecutor(one), TOKENIZER) as service:
        results = {kind.feature: service.generate_async(kind.prompt, **kind.python(), streaming=True) for kind in kinds}
        for result in results.values():
            result.result()
    return results


@pytest.fixture(
    scope="module",
    params=[(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 2, 1)],
    ids=["one rank", "two ranks", "two stages", "two replicas", "contexts apart"],
)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="run-") as run_directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, run_directory)
        patch.setenv("PYTHONPATH", str(Path(request_kinds.__file__).parent))
        patch.setattr(backoff, "LONGEST", 0.0)
        scene = Scene(*request.param)
        yield scene
        scene.service.shutdown()


def test_requests_of_all_kinds_go_on_when_ranks_die(scene: Scene) -> None:
    """Each rank is killed at a random response, and in the end three relaunches while they load, and one more rank
    while the requests are being replayed."""
    for rank in range(scene.num_ranks):
        choose = random.Random(rank)
        assert any(deaths_meet_requests(scene, rank, choose) for _ in range(TRIES)), (
            f"no deaths with that of rank {rank} have met requests"
        )
    assert scene.front.num_replays() or scene.front.num_handovers(), "no death has met a request"


def deaths_meet_requests(scene: Scene, rank: int, choose: random.Random) -> bool:
    """Whether all deaths came about, and requests waited for other ranks after each. On a busy machine the front may
    see a response so late that the ranks, when they die, have sent all others, too."""
    front = scene.front
    first = front.num_delivered + choose.randrange(scene.num_responses // 8, scene.num_responses)
    front.deaths = [(first, rank)]
    if rank == scene.num_ranks - 1:
        front.deaths.append((first + choose.randrange(1, scene.num_responses // 4), 0))
        front.launchers[0].num_deaths = 3
    num_wanted, num_killed, num_replays = len(front.deaths), front.num_killed, front.num_replays()
    num_pauses, num_losses = front.num_pauses(), front.num_losses()
    scene.check(scene.serve())
    came_about = not front.deaths and not front.launchers[0].num_deaths
    front.deaths, front.launchers[0].num_deaths = [], 0
    num_killed = front.num_killed - num_killed
    until(lambda: front.num_losses() - num_losses >= num_killed, "the front notices each death")
    assert front.num_losses() - num_losses == num_killed
    if scene.num_replicas > 1:
        # One of several may have answered all of its requests, or handed them over, when it dies.
        return came_about
    num_pauses, num_replays = front.num_pauses() - num_pauses, front.num_replays() - num_replays
    assert num_pauses <= num_killed and bool(num_pauses) == bool(num_replays), "what waited is sent again"
    return came_about and num_pauses == num_wanted
