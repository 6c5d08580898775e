"""The engine as a library."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fake_rank import MAX_SEQ_LEN, load_fake_runner
from fakes import expected_output
from harness import make_request

from inflight.config import EngineConfig
from inflight.errors import (
    DuplicateRequest,
    EngineUnavailable,
    InflightError,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    StepFailed,
)
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.front.generation_service import GenerationService
from inflight.executor.in_process import InProcessExecutor
from inflight.request import OutputConfig, SamplingConfig
from inflight.result import FinishReason, Response, Result

LONG = MAX_SEQ_LEN - 100


@pytest.fixture
def service() -> Iterator[GenerationService]:
    with GenerationService(InProcessExecutor(EngineConfig(max_batch_size=4), load_fake_runner)) as service:
        yield service


def test_a_result_is_waited_for(service: GenerationService) -> None:
    generation = service.generate_async([1, 2, 3], 12, output_config=OutputConfig(return_log_probs=True))
    output = generation.result()
    assert output.token_ids == expected_output(generation.request, MAX_SEQ_LEN)
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.log_probs) == 12 and output.cum_log_prob == pytest.approx(sum(output.log_probs))
    assert generation.done and generation.result(timeout=0) == output


def test_every_sequence_of_a_request_has_an_output(service: GenerationService) -> None:
    sampling = SamplingConfig(seed=9)
    generation = service.generate_async([1, 2, 3], 6, sampling_config=sampling, num_return_sequences=3, streaming=True)
    first = generation.result()
    outputs = generation.outputs
    assert outputs[0] == first and [output.index for output in outputs] == [0, 1, 2]
    expected = [expected_output(generation.request, MAX_SEQ_LEN, index) for index in range(3)]
    assert [output.token_ids for output in outputs] == expected
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)


def test_iterating_shows_it_grow(service: GenerationService) -> None:
    generation = service.generate_async([1, 2, 3], 50, streaming=True)
    outputs = list(generation)
    expected = expected_output(generation.request, MAX_SEQ_LEN)
    assert outputs[-1].token_ids == expected
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    lengths = [len(output.token_ids) for output in outputs]
    assert lengths == sorted(lengths) and all(o.token_ids == expected[: len(o.token_ids)] for o in outputs)
    assert list(generation) == [outputs[-1]]


def test_an_iterator_left_behind_by_a_closed_loop_harms_nobody(service: GenerationService) -> None:
    generation = service.generate_async([1, 2, 3], LONG, streaming=True)
    iterator = generation.__aiter__()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(iterator))
    loop.close()
    generation.cancel()
    assert service.generate_async([1, 2, 3], 12).result().finish_reason is FinishReason.LENGTH


async def test_event_loops_wait_and_iterate_too(service: GenerationService) -> None:
    generations = [service.generate_async([n], 20, streaming=n % 2 == 0) for n in range(8)]
    outputs = await asyncio.gather(*(generation.aresult() for generation in generations))
    assert [o.token_ids for o in outputs] == [expected_output(g.request, MAX_SEQ_LEN) for g in generations]
    streamed = service.generate_async([9], 20, streaming=True)
    assert [output.token_ids async for output in streamed][-1] == expected_output(streamed.request, MAX_SEQ_LEN)


def test_cancelling_keeps_what_there_is(service: GenerationService) -> None:
    generation = service.generate_async([1], LONG, streaming=True)
    first = next(iter(generation))
    generation.cancel()
    output = generation.result()
    assert output.finish_reason is FinishReason.CANCELLED
    assert output.token_ids[: len(first.token_ids)] == first.token_ids


@pytest.mark.parametrize(
    "kind",
    [InvalidRequest, DuplicateRequest, QueueFull, RequestCancelled, RequestTimedOut, StepFailed, EngineUnavailable],
)
def test_an_error_is_of_the_kind_that_ended_the_request(kind: type[InflightError]) -> None:
    generation = GenerationResult(make_request(1, 2), lambda request_id: None)
    generation.add(Response.of_error(1, kind("a sentence")))
    with pytest.raises(kind, match="a sentence"):
        generation.result()


def test_errors_are_raised(service: GenerationService) -> None:
    with pytest.raises(InvalidRequest):
        service.generate_async([], 5)
    generation = service.generate_async([1], LONG)
    with pytest.raises(TimeoutError):
        generation.result(timeout=0)
    service.close()
    with pytest.raises(EngineUnavailable):
        for _ in generation:
            raise AssertionError("nothing was streamed")


def test_a_response_costs_what_it_brings_and_an_output_stays_as_it_was() -> None:
    """What has come is not copied again for each response: of a long answer that would be most of the work."""
    generation = GenerationResult(make_request(1, 2), lambda request_id: None)
    generation.add(Response(request_id=1, result=Result(output_token_ids=[1, 2])))
    kept = generation._sequences[0].token_ids
    first = next(iter(generation))
    generation.add(Response(request_id=1, result=Result(output_token_ids=[3], is_final=True)))
    assert generation._sequences[0].token_ids is kept
    assert first.token_ids == [1, 2] and generation.result().token_ids == [1, 2, 3]
