"""Sequences of one request share its prompt: computed once, blocks counted once, tokens as if each were alone."""

from __future__ import annotations

from typing import Any

import pytest
from fake_network import expected_output
from fake_runner import Row
from harness import Harness, make_request, prefills

from inflight.batch_manager.active_request import ActiveRequest
from inflight.config import SchedulerPolicy
from inflight.errors import StepFailed
from inflight.request import Request
from inflight.result import FinishReason
from inflight.sequence_seed import sequence_seed

POLICIES = list(SchedulerPolicy)


def outputs(harness: Harness, request: Request) -> list[list[int]]:
    return [harness.tokens(request.request_id, index) for index in range(request.num_return_sequences)]


def assert_all_as_expected(harness: Harness, *requests: Request) -> None:
    for request in requests:
        expected = [harness.expected(request.request_id, index) for index in range(request.num_return_sequences)]
        assert outputs(harness, request) == expected, request
        assert harness.num_finals(request.request_id) == 1
    assert harness.kv_cache.num_used_blocks == 0


def num_prefill_tokens(harness: Harness) -> int:
    return sum(part.num_tokens for step in harness.runner.launched for part in prefills(step))


def num_copies(harness: Harness) -> int:
    return sum(len(step.block_copies) for step in harness.runner.launched)


# -- the prompt --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("max_num_tokens", [4, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 11])
def test_the_prompt_is_computed_once(policy: SchedulerPolicy, reuse: bool, max_num_tokens: int, length: int) -> None:
    """All but its last token, whose logits each sequence needs for itself."""
    harness = Harness(policy=policy, enable_reuse=reuse, max_num_tokens=max_num_tokens)
    request = make_request(1, length, 6, seed=3, num_return_sequences=4)
    harness.serve(request)
    assert_all_as_expected(harness, request)
    assert num_prefill_tokens(harness) == length + 3
    assert num_copies(harness) == (0 if length % 4 == 1 else 3), "only where the last token lies within a block"


def test_the_first_sequence_has_the_tokens_of_the_request_with_one_and_each_other_those_of_its_seed() -> None:
    request = make_request(1, 10, 8, seed=11, num_return_sequences=3)
    harness = Harness()
    harness.serve(request)
    for index in range(3):
        alone = Harness()
        alone.serve(make_request(1, 10, 8, seed=sequence_seed(11, index)))
        assert alone.tokens(1) == harness.tokens(1, index)
    assert len({tuple(tokens) for tokens in outputs(harness, request)}) == 3


def test_full_blocks_are_shared_and_the_last_one_is_each_sequences_own() -> None:
    harness = Harness(block_size=4, max_num_tokens=64)
    harness.submit(make_request(1, 10, 8, num_return_sequences=3))
    harness.step()
    harness.step()
    tables = [new.block_ids for step in harness.runner.launched for new in step.new_sequences]
    assert len(tables) == 3
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}
    assert len({table[2] for table in tables}) == 3
    assert harness.kv_cache.num_used_blocks == 2 + 3


def test_the_other_sequences_start_one_step_after_the_prompts_last_chunk() -> None:
    harness = Harness(max_num_tokens=4)
    harness.serve(make_request(1, 11, 4, num_return_sequences=3))
    first_rows = [step.num_tokens for step in harness.runner.launched[:4]]
    assert first_rows == [4, 4, 3, 3], "three chunks, then a token of each"
    assert [len(step.new_sequences) for step in harness.runner.launched[:4]] == [1, 0, 0, 2]


def test_a_burst_of_requests_starts_without_gaps() -> None:
    """A sequence that waits for its sibling's prompt holds up nobody behind it."""
    harness = Harness(max_batch_size=8, max_num_tokens=64)
    requests = [make_request(i, 6, 5, seed=i, num_return_sequences=2) for i in range(4)]
    harness.submit(*requests)
    harness.step()
    harness.step()
    assert [len(step.rows) for step in harness.runner.launched] == [4, 8]
    harness.run_until_idle()
    assert_all_as_expected(harness, *requests)


def test_a_request_is_not_overtaken_between_its_sequences() -> None:
    harness = Harness(max_batch_size=4, max_num_tokens=6)
    first, second, third = make_request(1, 10, 6, num_return_sequences=3), make_request(2, 2, 6), make_request(3, 2, 6)
    harness.submit(first, second, third)
    while not harness.num_finals(1):
        harness.step()
        started = [new.token_ids[0] for step in harness.runner.launched for new in step.new_sequences]
        if started.count(first.input_token_ids[0]) < 3:
            assert started.count(third.input_token_ids[0]) == 0
    harness.run_until_idle()
    assert_all_as_expected(harness, first, second, third)


def test_a_cached_prompt_is_continued_from_the_cache() -> None:
    harness = Harness(max_num_tokens=64)
    prompt = list(range(17))
    harness.serve(make_request(1, prompt, 2))
    request = make_request(2, prompt, 3, seed=5, num_return_sequences=3)
    harness.serve(request)
    assert_all_as_expected(harness, request)
    assert num_prefill_tokens(harness) == 17 + 3


def test_the_account_of_a_request_covers_all_its_sequences() -> None:
    ticks = iter(range(1, 1000))
    harness = Harness(block_size=4, max_num_tokens=64, clock=lambda: next(ticks))
    harness.serve(make_request(1, 10, 2, num_return_sequences=3))
    metrics = harness.final(1).request_perf_metrics
    assert metrics is not None
    assert metrics.kv_cache_alloc_new_blocks == 3 + 2 and metrics.kv_cache_reused_blocks == 2 * 2
    assert metrics.kv_cache_alloc_total_blocks == 9 and metrics.kv_cache_missed_blocks == 2
    times = (metrics.arrival_time_ns, metrics.first_scheduled_time_ns)
    times += (metrics.first_token_time_ns, metrics.last_token_time_ns)
    assert list(times) == sorted(times) and len(set(times)) == 4


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SchedulerPolicy.GUARANTEED_NO_EVICT, SchedulerPolicy.STATIC_BATCH])
def test_the_worst_case_counts_the_prompts_blocks_once(policy: SchedulerPolicy) -> None:
    """A prompt of 30 and 7 tokens behind it are 10 blocks of 4; 7 are shared, so three sequences need 7 + 3 * 3."""
    for num_blocks, num_running in ((16, 3), (15, 2)):
        harness = Harness(policy=policy, num_blocks=num_blocks, block_size=4, max_num_tokens=64)
        request = make_request(1, 30, 8, num_return_sequences=3)
        harness.submit(request)
        harness.step()
        harness.step()
        assert harness.scheduler.num_running == num_running
        harness.run_until_idle()
        assert_all_as_expected(harness, request)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("length", [9, 12])
@pytest.mark.parametrize("num_blocks", range(2, 10))
def test_siblings_find_their_blocks_behind_those_of_a_window_that_they_share(
    num_blocks: int, length: int, reuse: bool
) -> None:
    """A full one, or also the last of the prompt until it is copied."""
    harness = Harness(windows=(3,), num_blocks=num_blocks, block_size=8, max_num_tokens=5, enable_reuse=reuse)
    request = make_request(1, length, 20, num_return_sequences=4)
    harness.serve(request)
    assert_all_as_expected(harness, request)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("num_blocks", [6, 7, 9])
def test_sequences_that_do_not_fit_together_run_one_after_the_other(
    policy: SchedulerPolicy, reuse: bool, num_blocks: int
) -> None:
    harness = Harness(policy=policy, num_blocks=num_blocks, block_size=4, enable_reuse=reuse)
    requests = [make_request(i, 9 + i, 12, seed=i, num_return_sequences=4) for i in range(3)]
    harness.serve(*requests)
    assert_all_as_expected(harness, *requests)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("max_num_tokens", [4, 64])
def test_single_sequences_of_a_request_are_paused_and_go_on(reuse: bool, max_num_tokens: int) -> None:
    harness = Harness(
        policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=9, max_num_tokens=max_num_tokens, enable_reuse=reuse
    )
    request = make_request(1, 9, 18, seed=2, num_return_sequences=4, streaming=True)
    harness.submit(request)
    paused = set()
    for _ in range(200):
        harness.step()
        paused.add(harness.scheduler.num_paused)
    assert {1, 2} & paused, "some are paused while others run"
    assert_all_as_expected(harness, request)


def test_a_sequence_whose_prompt_was_computed_does_not_need_its_sibling_any_more() -> None:
    """The first ends with its first token, before the others have copied the block that the prompt ends in."""
    harness = Harness(enable_reuse=False)
    scheduler, runner = harness.scheduler, harness.runner
    sequences = ActiveRequest(
        make_request(1, 10, 8, num_return_sequences=3), max_seq_len=64, arrival_time_ns=0
    ).sequences
    for sequence in sequences:
        scheduler.add(sequence)

    def step() -> None:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        handle = runner.forward(scheduled)
        runner.sample(handle)
        scheduler.update(scheduled, runner.collect(handle))
        scheduler.check()

    step()
    scheduler.stop(sequences[0], FinishReason.CANCELLED)
    scheduler.check()
    assert harness.kv_cache.num_used_blocks == 3
    while not all(sequence.is_finished for sequence in sequences):
        step()
    for sequence in sequences[1:]:
        assert sequence.token_ids[10:] == expected_output(sequence.request, 64, sequence.index)
    assert num_prefill_tokens(harness) == 10 + 2 and harness.kv_cache.num_used_blocks == 0


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("after", range(14))
def test_stopping_at_any_moment_frees_everything(policy: SchedulerPolicy, after: int) -> None:
    harness = Harness(policy=policy, num_blocks=14, max_num_tokens=5)
    many = [make_request(i, 9 + i, 10, seed=i, num_return_sequences=3, streaming=True) for i in (1, 2)]
    harness.submit(*many, make_request(3, 5, 6))
    for _ in range(after):
        harness.step()
    harness.stops = {1: FinishReason.TIMED_OUT, 2: FinishReason.CANCELLED}
    harness.step()
    harness.run_until_idle()
    for request in many:
        assert harness.num_finals(request.request_id) == 1
        for index in range(3):
            results = harness.results(request.request_id, index)
            assert [result.is_sequence_final for result in results] == [False] * (len(results) - 1) + [True]
            tokens = harness.tokens(request.request_id, index)
            assert tokens == harness.expected(request.request_id, index)[: len(tokens)]
    assert harness.tokens(3) == harness.expected(3)
    assert harness.kv_cache.num_used_blocks == 0


@pytest.mark.parametrize("where", ["fail_launch", "fail_collect"])
@pytest.mark.parametrize("step", range(7))
def test_a_failing_step_at_any_moment_frees_everything(where: str, step: int) -> None:
    options: dict[str, Any] = {where: lambda number: number == step}
    harness = Harness(max_num_tokens=5, runner=options)
    harness.serve(make_request(1, 9, 5, num_return_sequences=3))
    assert isinstance(harness.error(1), StepFailed) and harness.num_finals(1) == 1
    assert harness.kv_cache.num_used_blocks == 0
    again = make_request(2, 9, 5, num_return_sequences=3)
    harness.serve(again)
    assert_all_as_expected(harness, again)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_request_may_end_with_its_first_tokens(max_tokens: int) -> None:
    harness = Harness(max_num_tokens=4)
    requests = [make_request(i, 6, max_tokens, seed=i, num_return_sequences=3) for i in range(5)]
    harness.serve(*requests)
    assert_all_as_expected(harness, *requests)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [9, 12, 13])
def test_nothing_that_a_failed_request_computed_is_reused(failing: int, num_tokens: int) -> None:
    """Its sequences share blocks: if one of them is not finite, what the others hold is not trusted either."""
    seed = sequence_seed(7, failing)

    def not_finite(row: Row) -> str | None:
        return "not finite" if row.new.sampling_config.seed == seed and len(row.token_ids) == num_tokens else None

    harness = Harness(max_num_tokens=64, runner={"row_error": not_finite})
    request = make_request(1, 8, 10, seed=7, num_return_sequences=3)
    harness.serve(request)
    assert str(harness.error(1)) == "not finite" and harness.kv_cache.num_used_blocks == 0
    longer = [*request.input_token_ids, *expected_output(request, 64, 2)]
    harness.serve(make_request(2, longer[:5], 1))
    harness.serve(make_request(3, longer, 2))
    metrics = harness.final(3).request_perf_metrics
    assert metrics is not None and metrics.kv_cache_reused_blocks == 1, "what the second request computed"
