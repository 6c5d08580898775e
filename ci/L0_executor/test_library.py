"""The public API on real ranks and the default checkpoint: what its page shows, one rank and two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls import until

from inflight import (
    EngineConfig,
    EngineUnavailable,
    Executor,
    FinishReason,
    GenerationExecutor,
    InProcessExecutor,
    IterationStats,
    Request,
    RequestStage,
    RequestStats,
    Response,
    SamplingConfig,
)
from inflight.executor.front.generation_result import GenerationResult
from inflight.run_directory import RUN_DIRECTORY
from inflight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "model_repository" / "llm" / "1" / "checkpoint"
PATIENCE = 120
LONG, ENDLESS = 400, 2000
"""Tokens: of a request that ends, and of one that is still in flight when something is done to it."""
STORIES = ["Once upon a time", "The little dog", "A girl named Ann", "In the garden"]


def config(num_ranks: int = 1, **changes: object) -> EngineConfig:
    small = {"max_batch_size": 8, "max_tokens_in_paged_kv_cache": 8192, "num_threads": 1}
    # In float32: the order of a sum decides the last digit, which in bfloat16 is coarse enough to change a draw.
    return EngineConfig(dtype="float32", tensor_parallel_size=num_ranks, **{**small, **changes})


@pytest.fixture(autouse=True, scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_DIRECTORY, str(tmp_path_factory.mktemp("run")))
        yield


@pytest.fixture(scope="module", params=[1, 2], ids=["uniproc", "two ranks"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    wanted = config(request.param, request_stats_max_iterations=1000)
    with Executor(CHECKPOINT, wanted) as executor:
        yield executor
    assert executor.engine_pids() == []


@pytest.fixture(scope="module", params=[1, 2], ids=["uniproc", "two ranks"])
def library(request: pytest.FixtureRequest) -> Iterator[GenerationExecutor]:
    with GenerationExecutor.create(CHECKPOINT, config(request.param)) as library:
        yield library


@pytest.fixture(scope="module")
def in_process() -> Iterator[GenerationExecutor]:
    """The same engine on a thread of this process: what the others must say, too."""
    engine = InProcessExecutor(EngineConfig(**{**vars(config()), "gpt_model_path": str(CHECKPOINT)}))
    with GenerationExecutor(engine, Tokenizer.load(CHECKPOINT)) as executor:
        yield executor


def collect(executor: Executor, request_id: int) -> list[Response]:
    responses: list[Response] = []
    while not any(response.is_final for response in responses):
        responses += executor.await_responses(request_id, timeout=PATIENCE)
    return responses


def tokens(responses: list[Response]) -> list[int]:
    return [token for response in responses if response.result for token in response.result.output_token_ids]


# -- Executor ----------------------------------------------------------------------------------------------------------


def test_each_request_gets_its_own_responses(executor: Executor) -> None:
    requests = [
        Request(input_token_ids=[10, 20, n], max_tokens=8, streaming=n % 2 == 0, client_id=f"client {n}")
        for n in range(6)
    ]
    ids = executor.enqueue_requests(requests)
    assert len(set(ids)) == 6
    firsts = executor.await_responses(ids, timeout=PATIENCE)
    for number, (request_id, first) in enumerate(zip(ids, firsts, strict=True)):
        responses = first if first[-1].is_final else first + collect(executor, request_id)
        assert {(response.request_id, response.client_id) for response in responses} == {
            (request_id, f"client {number}")
        }
        assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
        results = [response.result for response in responses if response.result is not None]
        assert (results[-1].is_sequence_final, results[-1].sequence_index, results[-1].decoding_iter) == (True, 0, 8)
        assert len(tokens(responses)) == 8
    assert executor.get_num_responses_ready() == 0 and executor.num_requests_in_flight() == 0
    (response,) = executor.await_responses(ids[0])
    assert response.has_error and "not in flight" in response.error_msg


def test_all_tokens_come_with_each_response_if_asked(executor: Executor) -> None:
    plain, accumulated = (
        collect(
            executor,
            executor.enqueue_request(
                Request(input_token_ids=[5, 6, 7], max_tokens=6, streaming=True, return_all_generated_tokens=wanted)
            ),
        )
        for wanted in (False, True)
    )
    whole = tokens(plain)
    lengths = []
    for response in accumulated:
        assert response.result is not None
        assert response.result.output_token_ids == whole[: len(response.result.output_token_ids)]
        lengths.append(len(response.result.output_token_ids))
    assert lengths == sorted(set(lengths)) and lengths[-1] == 6


def test_a_cancelled_request_ends_with_what_it_has(executor: Executor) -> None:
    request_id = executor.enqueue_request(Request(input_token_ids=[5], max_tokens=ENDLESS, streaming=True))
    first = executor.await_responses(request_id, timeout=PATIENCE)
    executor.cancel_request(request_id)
    last = collect(executor, request_id)[-1]
    assert first and last.result is not None and last.result.finish_reason is FinishReason.CANCELLED


def test_statistics_account_for_every_request(executor: Executor) -> None:
    ids = executor.enqueue_requests([Request(input_token_ids=[9] * (20 + n), max_tokens=100) for n in range(12)])
    for request_id in ids:
        collect(executor, request_id)
    iterations: list[IterationStats] = []
    listed: list[tuple[int, RequestStats]] = []

    def ours() -> list[IterationStats]:
        """Those since our first request: what came before may have arrived late."""
        first = min((number for number, _ in listed), default=0)
        return [stats for stats in iterations if listed and stats.iter >= first]

    while sum(stats.num_completed_requests for stats in ours()) < 12:
        iterations += executor.get_latest_iteration_stats(timeout=PATIENCE)
        for found in executor.get_latest_request_stats():
            listed += [(found.iter, stats) for stats in found.request_stats if stats.id in ids]
    seen = ours()
    assert sum(stats.num_new_active_requests for stats in seen) == 12
    assert sum(stats.num_completed_requests for stats in seen) == 12
    assert seen[-1].num_active_requests == 0
    assert max(stats.num_active_requests for stats in seen) == 8, "no more than max_batch_size at a time"
    assert max(stats.num_queued_requests for stats in seen) > 0
    assert all(stats.cpu_mem_usage > 0 and stats.iter_latency_ms > 0 for stats in seen)
    assert [stats.iter for stats in seen] == sorted(stats.iter for stats in seen)
    last = {stats.id: stats for _, stats in listed}
    assert set(last) == set(ids)
    assert {stats.stage for stats in last.values()} == {RequestStage.GENERATION_COMPLETE}
    assert {stats.num_generated_tokens for stats in last.values()} == {100}


def test_the_process_that_asks_is_no_rank(executor: Executor) -> None:
    assert executor.can_enqueue_requests() and not executor.is_participant() and executor.is_ready()


# -- GenerationExecutor ------------------------------------------------------------------------------------------------


def test_text_does_not_depend_on_where_the_ranks_are(
    library: GenerationExecutor, in_process: GenerationExecutor
) -> None:
    for sampling in (None, [SamplingConfig(temperature=1.0, seed=seed) for seed in range(len(STORIES))]):
        told = library.generate(STORIES, max_tokens=24, sampling_config=sampling, progress=False)
        expected = in_process.generate(STORIES, max_tokens=24, sampling_config=sampling, progress=False)
        assert [output.outputs for output in told] == [output.outputs for output in expected]
        assert all(output.text and output.finished for output in told)


def test_a_stream_is_the_same_text_and_ends_before_its_stop_string(library: GenerationExecutor) -> None:
    whole = library.generate(STORIES[0], max_tokens=40).text
    streamed = list(library.generate_async(STORIES[0], max_tokens=40, streaming=True))
    assert "".join(output.text_diff for output in streamed) == whole
    stop = whole[len(whole) // 2 :][:4]
    output = library.generate(STORIES[0], max_tokens=LONG, stop=[stop])
    assert output.text == whole[: whole.index(stop)] and output.finish_reason is FinishReason.STOP_WORDS


async def test_results_can_be_awaited(library: GenerationExecutor) -> None:
    output = await library.generate_async(STORIES[1], max_tokens=12)
    pieces = [each.text_diff async for each in library.generate_async(STORIES[1], max_tokens=12, streaming=True)]
    assert "".join(pieces) == output.text


def test_results_go_on_with_other_ranks_when_theirs_are_killed() -> None:
    with GenerationExecutor.create(CHECKPOINT, config()) as library:
        front = library._executor
        assert isinstance(front, Executor)

        def start() -> list[GenerationResult]:
            return [library.generate_async([n + 5], max_tokens=LONG, end_ids=[], streaming=True) for n in range(3)]

        undisturbed = [generation.result().token_ids for generation in start()]
        generations = start()
        for generation in generations:
            next(iter(generation))
        for pid in front.engine_pids():
            os.kill(pid, 9)
        assert [generation.result().token_ids for generation in generations] == undisturbed
        until(lambda: front.num_pauses() == 1, "the pause is counted")


def test_results_end_when_there_will_be_no_ranks_any_more() -> None:
    with GenerationExecutor.create(CHECKPOINT, config()) as library:
        generation = library.generate_async([5], max_tokens=ENDLESS, end_ids=[], streaming=True)
        next(iter(generation))
        library.shutdown()
        with pytest.raises(EngineUnavailable):
            generation.result()


def test_the_programs_of_the_librarys_page_run() -> None:
    first, of_encoder, events, _ = programs(ROOT / "backend" / "inflight" / "README.md")
    generated, _, streamed = run_program(first).rpartition("\n")
    assert len(generated) > 40 and streamed.strip() and "." not in streamed, "the stop string ends it and is cut off"
    assert "KVCacheCreatedData" in run_program(events)
    cosine, scores = run_program(of_encoder.replace("path/to/encoder", str(CHECKPOINT))).split(maxsplit=1)
    assert json.loads(scores)[0] == pytest.approx(float(cosine), abs=1e-6)


def programs(page: Path) -> list[str]:
    found: list[str] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return found


def run_program(program: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Loading" not in done.stderr, "bars are for terminals"
    return done.stdout
