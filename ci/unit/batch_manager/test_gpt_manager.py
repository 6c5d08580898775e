"""GptManager: the order and the rules of its four callbacks, and that one request's trouble stays its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from fakes import VOCAB_SIZE, Row, log_prob_of
from harness import Harness, make_request
from msgspec.structs import replace as replace_output

from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.gpt_manager import GptManager
from inflight.config import SchedulerPolicy
from inflight.errors import DuplicateRequest, InvalidRequest, StepFailed
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.request import Request, SamplingConfig
from inflight.result import FinishReason
from inflight.scheduler_output import StepOutput

STATS_KEYS = [
    "Timestamp",
    "Iteration Counter",
    "Active Request Count",
    "Max Request Count",
    "Runtime CPU Memory Usage",
    "Runtime GPU Memory Usage",
    "Runtime Pinned Memory Usage",
    "Max KV cache blocks",
    "Free KV cache blocks",
    "Used KV cache blocks",
    "Tokens per KV cache block",
    "Reused KV cache blocks",
    "Fraction used KV cache blocks",
    "Scheduled Requests",
    "Context Requests",
    "Generation Requests",
    "Total Context Tokens",
    "MicroBatch ID",
    "Paused Requests",
    "Waiting Requests",
]


# -- callbacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["get_inference_requests", "send_response"])
def test_get_and_send_are_mandatory(missing: str) -> None:
    harness = Harness()
    callbacks = {"get_inference_requests": lambda count: [], "send_response": lambda *response: None, missing: None}
    with pytest.raises(ValueError, match=missing):
        GptManager(
            runner=harness.runner,
            scheduler=harness.scheduler,
            callbacks=Callbacks(**callbacks),  # type: ignore[arg-type]
            limits=harness.manager._limits,
        )


def test_four_lambdas_are_enough() -> None:
    harness = Harness()
    requests, answers = [make_request(1, 4, 3)], []
    manager = GptManager(
        runner=harness.runner,
        scheduler=harness.scheduler,
        callbacks=Callbacks(
            get_inference_requests=lambda count: [requests.pop()] if requests else manager.shutdown() or [],
            send_response=lambda *response: answers.append(response),
        ),
        limits=harness.manager._limits,
    )
    manager.run()
    ((request_id, result, is_final, error),) = answers
    assert (request_id, is_final, error) == (1, True, None)
    assert len(result.output_token_ids) == 3


def test_the_order_of_callbacks() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 2, streaming=True))
    for _ in range(5):
        harness.calls.append("|")
        harness.step()
    assert " ".join(harness.calls) == (
        "| poll get stats "  # the prompt is launched
        "| poll get stats "  # the decode is launched behind it
        "| poll send 1 get stats "  # the prompt's token is there; nothing is left to launch
        "| poll send 1 final get "  # nothing is active any more: no stats
        "| poll get"
    )


def test_an_idle_loop_asks_for_requests_and_nothing_else() -> None:
    harness = Harness()
    harness.step()
    assert harness.calls == ["poll", "get"]
    assert harness.maxima == [4]


def test_the_maximum_is_what_the_batch_has_room_for() -> None:
    harness = Harness(max_batch_size=4)
    harness.submit(*(make_request(i, 4, 3) for i in range(6)))
    harness.run_until_idle()
    assert harness.maxima[:3] == [4, 0, 0], "also asked with 0, so that ranks meet in every iteration"
    assert min(harness.maxima) == 0 and harness.maxima.count(4) >= 1
    assert all(harness.num_finals(i) == 1 for i in range(6))


def test_nothing_is_held_when_the_final_response_is_sent() -> None:
    harness = Harness()
    seen = []

    def send(request_id: int, result: object, is_final: bool, error: object) -> None:
        seen.append((is_final, harness.kv_cache.num_used_blocks > 0, manager.num_active_requests))

    requests = [make_request(1, 6, 2, streaming=True)]
    manager = GptManager(
        runner=harness.runner,
        scheduler=harness.scheduler,
        callbacks=Callbacks(
            get_inference_requests=lambda count: [requests.pop() for _ in requests[:count]], send_response=send
        ),
        limits=harness.manager._limits,
    )
    for _ in range(6):
        manager.step()
    assert seen == [(False, True, 1), (True, False, 0)]


def test_streaming_sends_each_token_once_and_never_the_prompt() -> None:
    harness = Harness()
    harness.serve(make_request(1, 9, 6, streaming=True), make_request(2, 9, 6))
    results = [result for result, _, _ in harness.responses[1]]
    assert [len(result.output_token_ids) for result in results] == [1] * 6
    assert [result.is_final for result in results] == [False] * 5 + [True]
    assert [result.is_sequence_final for result in results] == [False] * 5 + [True]
    assert harness.tokens(1) == harness.expected(1)
    assert len(harness.responses[2]) == 1 and harness.tokens(2) == harness.expected(2)


def test_log_probs_only_if_asked() -> None:
    harness = Harness()
    harness.serve(make_request(1, 5, 4, streaming=True, log_probs=True), make_request(2, 5, 4))
    expected = [log_prob_of(token) for token in harness.tokens(1)]
    assert [value for result, _, _ in harness.responses[1] for value in result.log_probs] == expected
    assert harness.final(1).cum_log_prob == pytest.approx(sum(expected))
    assert harness.final(2).log_probs == [] and harness.final(2).cum_log_prob == 0.0


def test_perf_metrics_stand_on_the_final_result() -> None:
    ticks = iter(range(1, 1000))
    harness = Harness(block_size=4, clock=lambda: next(ticks))
    harness.serve(make_request(1, 9, 3, streaming=True))
    assert all(result.perf_metrics is None for result, is_final, _ in harness.responses[1] if not is_final)
    metrics = harness.final(1).perf_metrics
    assert metrics is not None
    times = (metrics.arrival_time_ns, metrics.first_scheduled_time_ns)
    times += (metrics.first_token_time_ns, metrics.last_token_time_ns)
    assert 0 < times[0] < times[1] < times[2] < times[3]
    assert metrics.kv_cache_alloc_total_blocks == metrics.kv_cache_alloc_new_blocks == 3


# -- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_are_the_batch_managers_json() -> None:
    moment = datetime(2025, 1, 2, 3, 4, 5, 678)
    harness = Harness(block_size=4, num_blocks=40, max_num_tokens=16, wall_clock=lambda: moment)
    harness.submit(make_request(1, 6, 8), make_request(2, 20, 8))
    harness.step()
    harness.step()
    first, second = (json.loads(text) for text in harness.stats)
    assert list(first) == STATS_KEYS
    assert first["Timestamp"] == "01-02-2025 03:04:05.000678"
    assert first["Active Request Count"] == first["Scheduled Requests"] == first["Context Requests"] == 2
    assert first["Total Context Tokens"] == 16
    assert (second["Context Requests"], second["Generation Requests"]) == (1, 1)
    assert second["Total Context Tokens"] == 10
    assert second["Iteration Counter"] == 2
    assert second["Used KV cache blocks"] + second["Free KV cache blocks"] == second["Max KV cache blocks"] == 40
    assert second["Fraction used KV cache blocks"] == second["Used KV cache blocks"] / 40
    assert second["Runtime GPU Memory Usage"] == 2000
    assert second["Max Request Count"] == 4 and second["Tokens per KV cache block"] == 4


def test_statistics_count_who_waits_and_who_is_paused() -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    harness.submit(make_request(1, 8, 14), make_request(2, 8, 12))
    harness.run_until_idle()
    stats = [json.loads(text) for text in harness.stats]
    assert any(entry["Paused Requests"] == 1 for entry in stats)
    assert all(e["Waiting Requests"] == e["Active Request Count"] - e["Scheduled Requests"] for e in stats)
    assert all(e["Paused Requests"] <= e["Waiting Requests"] for e in stats)


def test_statistics_that_nobody_wants_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    answers, made = iter([True, False, False, True]), []
    callbacks = replace(harness.callbacks, wants_batch_manager_stats=lambda: next(answers, False))
    harness.manager._callbacks = callbacks
    make = harness.manager.statistics
    monkeypatch.setattr(harness.manager, "statistics", lambda: made.append(True) or make())
    harness.serve(make_request(1, 4, 8))
    counters = [json.loads(text)["Iteration Counter"] for text in harness.stats]
    assert len(made) == len(counters) == 2 and counters == [1, 4]


# -- stops -------------------------------------------------------------------------------------------------------------


def test_stopping_an_active_request_answers_with_what_there_is() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 30), make_request(2, 4, 30, streaming=True), make_request(3, 4, 6))
    for _ in range(6):
        harness.step()
    harness.stops = {1, 2}
    harness.step()
    for request_id in (1, 2):
        assert harness.reason(request_id) is FinishReason.CANCELLED
        assert harness.num_finals(request_id) == 1
        tokens = harness.tokens(request_id)
        assert 0 < len(tokens) < 30 and tokens == harness.expected(request_id)[: len(tokens)]
    harness.run_until_idle()
    assert harness.tokens(3) == harness.expected(3)


def test_a_request_that_was_not_started_answers_without_tokens() -> None:
    harness = Harness(num_blocks=8)
    harness.submit(make_request(1, 20, 8), make_request(2, 20, 8))
    harness.step()
    harness.stops = {2}
    harness.step()
    assert harness.reason(2) is FinishReason.CANCELLED and harness.tokens(2) == []


def test_a_stop_may_carry_its_reason() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 30))
    harness.step()
    harness.stops = {1: FinishReason.TIMED_OUT}
    harness.step()
    assert harness.reason(1) is FinishReason.TIMED_OUT


def test_unknown_ids_are_ignored() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 3))
    harness.stops = {7, 8}
    harness.run_until_idle()
    harness.stops = {1}
    harness.step()
    assert list(harness.responses) == [1] and harness.num_finals(1) == 1
    assert harness.tokens(1) == harness.expected(1)


def test_a_natural_end_beats_a_stop_that_comes_with_it() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 1))
    harness.step()
    harness.step()
    harness.stops = {1}
    harness.run_until_idle()
    assert harness.num_finals(1) == 1


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_duplicate_is_refused_and_the_first_lives_on() -> None:
    harness = Harness()
    harness.submit(make_request(7, 4, 5), make_request(7, 3, 2))
    harness.step()
    error = harness.error(7)
    assert isinstance(error, DuplicateRequest) and error.code == "ALREADY_EXISTS"
    assert str(error) == (
        "Cannot process new request:   Request ID 7 already exist in request table. Will not be added."
    )
    harness.run_until_idle()
    assert harness.tokens(7) == harness.expected(7)


def test_an_id_may_be_used_again_after_its_final_response() -> None:
    harness = Harness()
    first = harness.serve(make_request(1, 4, 5))[1]
    del harness.responses[1]
    assert harness.serve(make_request(1, 4, 5))[1] == first


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (make_request(1, []), "the prompt is empty"),
        (make_request(1, 64, 1), "max_input_len"),
        (make_request(1, 4, 0), "max_tokens"),
        (make_request(1, [5, 97]), "vocabulary"),
        (make_request(1, [-1, 5]), "vocabulary"),
        (make_request(1, 4, 5, stop_words=[[]]), "stop_words"),
        (make_request(1, 4, 5, priority=3.0), "priority"),
        (make_request(1, 40, 20), "KV cache"),
        (make_request(1, 4, 5, num_return_sequences=2), "num_return_sequences"),
    ],
)
def test_a_bad_request_is_refused_while_its_neighbours_finish(bad: object, words: str) -> None:
    harness = Harness(num_blocks=8, block_size=4)
    harness.submit(make_request(10, 4, 5), bad, make_request(11, 4, 5))  # type: ignore[arg-type]
    harness.run_until_idle()
    assert isinstance(harness.error(1), InvalidRequest) and words in str(harness.error(1))
    for request_id in (10, 11):
        assert harness.tokens(request_id) == harness.expected(request_id)


def test_sampling_is_validated_too() -> None:
    harness = Harness()
    harness.submit(Request(request_id=1, input_token_ids=[1], max_tokens=1, sampling_config=SamplingConfig(top_p=2)))
    harness.step()
    assert "top_p" in str(harness.error(1))


# -- failing steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
@pytest.mark.parametrize("step", range(6))
def test_a_failing_step_ends_its_requests_and_nothing_else(where: str, step: int) -> None:
    harness = Harness(runner={where: lambda number: number == step})
    requests = [make_request(i, 5 + i, 6, streaming=i % 2 == 0) for i in range(4)]
    harness.submit(*requests)
    harness.run_until_idle()
    failed = [i for i in range(4) if isinstance(harness.responses[i][-1][2], StepFailed)]
    assert failed, "a step failed with somebody in it"
    for i in range(4):
        assert harness.num_finals(i) == 1
        tokens = harness.tokens(i)
        assert tokens == (harness.expected(i)[: len(tokens)] if i in failed else harness.expected(i))
    assert harness.error(failed[0]).code == "INTERNAL" and "failed" in str(harness.error(failed[0]))
    assert harness.kv_cache.num_free_blocks == harness.kv_cache.num_blocks
    harness.serve(make_request(20, requests[0].input_token_ids, 6))
    assert harness.tokens(20) == harness.expected(20), "the loop and the memory are good again"


@pytest.mark.parametrize("step", range(14))
def test_a_failing_step_also_ends_whoever_was_paused_with_a_token_in_it(step: int) -> None:
    harness = Harness(
        policy=SchedulerPolicy.MAX_UTILIZATION,
        num_blocks=6,
        max_num_tokens=64,
        runner={"fail_collect": lambda number: number == step},
    )
    requests = [make_request(1, 8, 14), make_request(2, 8, 12)]
    harness.serve(*requests)
    failed = [request_id for request_id in (1, 2) if isinstance(harness.responses[request_id][-1][2], StepFailed)]
    assert failed
    for request_id in (1, 2):
        assert harness.num_finals(request_id) == 1
        assert request_id in failed or harness.tokens(request_id) == harness.expected(request_id)


def test_a_request_that_had_not_started_survives_a_failing_step() -> None:
    harness = Harness(num_blocks=8, runner={"fail_collect": lambda number: number == 1})
    harness.submit(make_request(1, 20, 8), make_request(2, 20, 8))
    harness.run_until_idle()
    assert isinstance(harness.error(1), StepFailed)
    assert harness.tokens(2) == harness.expected(2)


def test_a_failure_that_nobody_waits_for_harms_nobody() -> None:
    plain = Harness().serve(make_request(1, 4, 20))[1]
    harness = Harness(max_batch_size=1, runner={"fail_collect": lambda number: number == 3})
    ends_in_step_2 = make_request(1, 4, 20, end_ids=[plain[2]])  # which is known when step 3 is launched
    harness.serve(ends_in_step_2, make_request(2, 4, 5))
    assert harness.runner.num_launches == 4 + 5
    assert harness.tokens(1) == plain[:3]
    assert harness.tokens(2) == harness.expected(2)


def test_prefixes_from_before_a_failing_step_are_forgotten() -> None:
    harness = Harness(runner={"fail_collect": lambda number: number == 4})
    prompt = list(range(13))
    harness.serve(make_request(1, prompt, 2))
    harness.serve(make_request(2, [50, 51], 5))
    assert isinstance(harness.error(2), StepFailed)
    harness.serve(make_request(3, prompt, 2))
    assert harness.tokens(3) == harness.expected(3)
    assert harness.final(3).perf_metrics.kv_cache_reused_blocks == 0


def test_a_failing_step_leaves_the_loop_if_ranks_must_not_drift() -> None:
    harness = Harness(raise_on_step_failure=True, runner={"fail_collect": lambda number: number == 0})
    harness.submit(make_request(1, 4, 5))
    with pytest.raises(RuntimeError, match="step 0 failed"):
        harness.run_until_idle()


def test_a_row_that_cannot_go_on_ends_alone() -> None:
    def not_finite(row: Row) -> str | None:
        return "logits are not finite" if row.new.sampling_config.seed == 3 and len(row.token_ids) == 13 else None

    harness = Harness(runner={"row_error": not_finite})
    requests = [make_request(i, 8, 10, seed=i, streaming=True) for i in range(4)]
    harness.serve(*requests)
    assert str(harness.error(3)) == "logits are not finite" and harness.error(3).code == "INTERNAL"
    assert harness.num_finals(3) == 1 and len(harness.tokens(3)) == 4
    for i in range(3):
        assert harness.tokens(i) == harness.expected(i)
    harness.serve(make_request(9, requests[3].input_token_ids, 2))
    assert harness.final(9).perf_metrics.kv_cache_reused_blocks == 0, "what the row computed is not reused"


# -- two halves --------------------------------------------------------------------------------------------------------


def log_halves(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    for name in ("forward", "sample", "collect"):
        half = getattr(harness.runner, name)

        def logged(argument: object, name: str = name, half: Callable[[object], object] = half) -> object:
            result = half(argument)
            log.append(f"{name} {result if name == 'forward' else argument}")
            return result

        monkeypatch.setattr(harness.runner, name, logged)
    return log


def test_a_step_is_sampled_at_once_and_before_the_step_before_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    log = log_halves(harness, monkeypatch)
    harness.serve(make_request(1, 4, 3))
    assert log == [
        *("forward 0", "sample 0", "forward 1", "sample 1", "collect 0"),
        *("forward 2", "sample 2", "collect 1", "collect 2"),
    ]


GUIDED: dict[str, Any] = {
    "guided_decoding_params": GuidedDecodingParams(guide_type=GuideType.JSON),
    "end_ids": [VOCAB_SIZE - 1],
}


def test_a_step_whose_masks_depend_on_the_token_before_is_sampled_when_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its network runs all the same while the step before is brought to the host."""
    harness = Harness()
    log = log_halves(harness, monkeypatch)
    harness.serve(make_request(1, 4, 3, **GUIDED))
    assert log == [
        *("forward 0", "sample 0", "forward 1", "collect 0", "sample 1"),
        *("forward 2", "collect 1", "sample 2", "collect 2"),
    ]
    assert harness.tokens(1) == harness.expected(1)


def test_masks_of_some_hold_up_nobody_else_for_longer_than_they_live() -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=10)
    options: dict[int, dict[str, Any]] = {1: GUIDED, 4: GUIDED}
    harness.submit(*(make_request(i, 6, 4 + 3 * i, streaming=True, **options.get(i, {})) for i in range(1, 7)))
    for _ in range(9):
        harness.step()
    harness.stops = {4}
    harness.run_until_idle()
    for request_id in (1, 2, 3, 5, 6):
        assert harness.tokens(request_id) == harness.expected(request_id)
    late = [step.samples_late for step in harness.runner.launched]
    assert any(late) and not late[-1], "without masks nothing waits"


@pytest.mark.parametrize("step", range(7))
def test_a_step_that_fails_while_another_waits_to_be_sampled(step: int) -> None:
    harness = Harness(runner={"fail_collect": lambda number: number == step})
    harness.serve(make_request(1, 4, 7, **GUIDED), make_request(2, 4, 7))
    failed = [request_id for request_id in (1, 2) if isinstance(harness.responses[request_id][-1][2], StepFailed)]
    assert failed
    for request_id in (1, 2):
        assert harness.num_finals(request_id) == 1
        assert request_id in failed or harness.tokens(request_id) == harness.expected(request_id)
    harness.serve(make_request(3, 4, 7))
    assert harness.tokens(3) == harness.expected(3)


def test_a_row_that_is_refused_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    collect = harness.runner.collect

    def refusing(handle: int) -> StepOutput:
        """The row of the first request is refused in the third step, and has no token."""
        output = collect(handle)
        if handle != 2:
            return output
        return replace_output(output, token_ids=[[], *output.token_ids[1:]], refused={0: "too slow"})

    monkeypatch.setattr(harness.runner, "collect", refusing)
    harness.serve(make_request(1, 4, 7, **GUIDED), make_request(2, 4, 7))
    assert isinstance(harness.error(1), InvalidRequest) and str(harness.error(1)) == "too slow"
    assert harness.tokens(2) == harness.expected(2) and harness.num_finals(1) == 1


# -- the end -----------------------------------------------------------------------------------------------------------


def test_shutdown_finishes_what_is_active_and_fetches_no_more() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 8), make_request(2, 4, 3))
    harness.step()
    harness.manager.shutdown()
    harness.submit(make_request(3, 4, 3))
    harness.calls.clear()
    harness.manager.run()
    assert "get" not in harness.calls and "poll" in harness.calls
    assert harness.tokens(1) == harness.expected(1) and harness.tokens(2) == harness.expected(2)
    assert 3 not in harness.responses
    assert harness.runner.num_outstanding == 0


def test_the_terminating_request_ends_the_loop_at_once() -> None:
    harness = Harness(terminate_request_id=99)
    harness.submit(make_request(1, 4, 30))
    harness.step()
    harness.submit(make_request(99, 1, 1), make_request(2, 4, 3))
    harness.manager.run()
    assert harness.responses == {}, "active requests are dropped without responses"
    assert harness.calls[-1] == "get"
