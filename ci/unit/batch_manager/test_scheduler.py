"""Scheduler: who runs in a step, on what memory, and that nobody's tokens depend on it.

Every scenario goes through a GptManager and a FakeRunner, whose tokens depend on the whole prefix as it lies in the
simulated KV memory: a wrong block, row or position changes them or fails the step that reads it.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness, decodes, make_request, prefills, tokens_alone

from inflight.batch_manager.sequence import Sequence, SequenceStatus
from inflight.config import SchedulerPolicy
from inflight.errors import InvalidRequest
from inflight.request import Request
from inflight.result import FinishReason
from inflight.scheduler_output import StepOutput

POLICIES = list(SchedulerPolicy)


def mixed_requests(count: int = 12) -> list[Request]:
    """Long and short, some with common prefixes, some of which end by themselves."""
    shared = [(position * 5) % 97 for position in range(21)]
    requests = []
    for i in range(count):
        prompt = [*shared[: 3 * i % 22], i, 2 * i] if i % 2 else 1 + (i * 7) % 30
        ends = {"end_ids": [3, 50, 60, 7, 11, 90, 23, 45]} if i % 3 == 0 else {}
        requests.append(make_request(100 + i, prompt, 1 + (i * 5) % 20, seed=i, streaming=i % 2 == 0, **ends))
    return requests


def assert_all_as_expected(harness: Harness, requests: list[Request]) -> None:
    for request in requests:
        assert harness.tokens(request.request_id) == harness.expected(request.request_id), request
        assert harness.num_finals(request.request_id) == 1
    assert harness.kv_cache.num_free_blocks == harness.kv_cache.num_blocks


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_num_tokens", [4, 16, 200])
@pytest.mark.parametrize("reuse", [True, False])
def test_tokens_do_not_depend_on_the_batch(
    policy: SchedulerPolicy, block_size: int, max_num_tokens: int, reuse: bool
) -> None:
    harness = Harness(
        policy=policy,
        block_size=block_size,
        num_blocks=-(-64 // block_size),
        max_num_tokens=max_num_tokens,
        enable_reuse=reuse,
    )
    requests = mixed_requests()
    harness.serve(*requests)
    assert_all_as_expected(harness, requests)


def test_decodes_and_prompts_share_a_step_within_its_tokens() -> None:
    harness = Harness(max_num_tokens=8)
    harness.submit(make_request(1, 4, 10))
    harness.step()
    harness.submit(make_request(2, 20, 4))
    harness.run_until_idle()
    mixed = [step for step in harness.runner.launched if decodes(step) and prefills(step)]
    assert [prefills(step)[0].num_tokens for step in mixed] == [7, 7, 6]
    assert [prefills(step)[0].num_sampled for step in mixed] == [0, 0, 1]


def test_prompts_fill_a_step_to_the_last_token() -> None:
    harness = Harness(max_num_tokens=8)
    harness.submit(make_request(1, 10, 8), make_request(2, 10, 8), make_request(3, 4, 8))
    for _ in range(4):
        harness.step()
    assert [step.num_tokens for step in harness.runner.launched] == [8, 8, 8, 3]


def test_a_row_is_described_once_and_then_by_differences() -> None:
    harness = Harness(block_size=4, max_num_tokens=8)
    harness.serve(make_request(1, 10, 6))
    first, *others = harness.runner.launched
    assert len(first.new_sequences) == 1 and first.new_sequences[0].block_ids and not first.rows[0].new_block_ids
    assert not any(step.new_sequences for step in others)
    added = [part.new_block_ids for step in others for part in step.rows]
    assert [len(blocks) for blocks in added] == [1, 0, 0, 1, 0, 0]


def test_a_second_step_is_launched_before_the_first_is_known() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 5))
    harness.step()
    harness.step()
    assert harness.runner.num_outstanding == 2 and harness.responses == {}
    harness.run_until_idle()
    assert len(harness.runner.launched) == 5, "no step beyond max_tokens"


def test_a_sequence_that_turns_out_finished_loses_its_later_rows() -> None:
    harness = Harness()
    request = make_request(1, 4, 20, streaming=True)
    ends_at = tokens_alone(request)[4]
    request = make_request(1, 4, 20, streaming=True, end_ids=[ends_at])
    harness.serve(request)
    assert harness.tokens(1) == harness.expected(1)
    assert harness.reason(1) is FinishReason.END_ID
    assert len(harness.runner.launched) == len(harness.tokens(1)) + 1


def test_priority_then_first_come() -> None:
    harness = Harness(max_batch_size=4, max_num_tokens=4)
    harness.submit(
        make_request(1, 4, 2, priority=0.2),
        make_request(2, 4, 2),
        make_request(3, 4, 2, priority=0.9),
        make_request(4, 4, 2),
    )
    harness.run_until_idle()
    started = [new.token_ids for step in harness.runner.launched for new in step.new_sequences]
    assert started == [harness.requests[i].input_token_ids for i in (3, 2, 4, 1)]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    harness = Harness(num_blocks=8, max_num_tokens=64)
    harness.submit(make_request(1, 20, 8), make_request(2, 20, 8), make_request(3, 1, 1))
    harness.step()
    assert harness.scheduler.num_running == 1, "2 does not fit beside 1, and 3 waits behind it"
    harness.run_until_idle()
    assert_all_as_expected(harness, list(harness.requests.values()))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_has_started_is_never_paused_under_guaranteed_no_evict() -> None:
    harness = Harness(num_blocks=10, max_num_tokens=64)
    requests = [make_request(i, 5 + i, 15) for i in range(6)]
    harness.submit(*requests)
    for _ in range(200):
        harness.step()
        assert harness.scheduler.num_paused == 0
    assert_all_as_expected(harness, requests)


def test_worst_case_counts_a_shared_prefix_once() -> None:
    prefix = list(range(32))
    harness = Harness(num_blocks=12, block_size=4, max_num_tokens=64)
    harness.submit(make_request(1, [*prefix, 40], 8))
    harness.step()
    harness.submit(make_request(2, [*prefix, 41], 8))
    harness.step()
    assert harness.scheduler.num_running == 2, "8 shared blocks and 2 of its own for each: 12"
    harness.run_until_idle()
    assert_all_as_expected(harness, list(harness.requests.values()))


@pytest.mark.parametrize(("num_blocks", "num_running"), [(3, 1), (4, 2)])
def test_worst_case_counts_a_shared_block_of_a_window_for_everyone(num_blocks: int, num_running: int) -> None:
    """Whoever has passed it takes another one while it is still the other's: each may hold 2 blocks at a time."""
    prefix = list(range(8))
    harness = Harness(windows=(3,), num_blocks=num_blocks, block_size=8, max_num_tokens=5)
    harness.serve(make_request(1, [*prefix, 40], 1))
    harness.submit(make_request(2, [*prefix, 41], 20), make_request(3, [*prefix, 42], 20))
    harness.step()
    assert harness.scheduler.num_running == num_running
    harness.run_until_idle()
    assert_all_as_expected(harness, list(harness.requests.values()))


def test_a_prefix_that_only_the_cache_remembers_is_not_room() -> None:
    prefix = list(range(32))
    harness = Harness(num_blocks=12, block_size=4, max_num_tokens=64, max_batch_size=4)
    harness.serve(make_request(1, [*prefix, 40], 2))
    harness.submit(make_request(2, [60, 61], 15), make_request(3, [*prefix, 41], 8))
    harness.step()
    assert harness.scheduler.num_running == 1, "4 blocks are promised to 2, and 3 needs 10 free ones, cached or not"
    harness.run_until_idle()
    assert_all_as_expected(harness, list(harness.requests.values()))


def test_prompt_of_a_cached_prefix_is_not_computed_again() -> None:
    harness = Harness(max_num_tokens=64)
    prompt = list(range(17))
    harness.serve(make_request(1, prompt, 2))
    harness.serve(make_request(2, prompt, 2), make_request(3, prompt, 2, cache_salt="other"))
    assert_all_as_expected(harness, list(harness.requests.values()))
    step = harness.runner.launched[2]
    assert [(part.start, part.num_tokens) for part in prefills(step)] == [(16, 1), (0, 17)]
    assert harness.final(2).request_perf_metrics.kv_cache_reused_blocks == 4
    assert harness.final(3).request_perf_metrics.kv_cache_reused_blocks == 0


def test_generated_tokens_are_reused_as_a_prefix_too() -> None:
    harness = Harness(max_num_tokens=64)
    first = make_request(1, 4, 12)
    harness.serve(first)
    harness.serve(make_request(2, [*first.input_token_ids, *harness.tokens(1), 5], 3))
    assert harness.final(2).request_perf_metrics.kv_cache_reused_blocks == 3
    assert harness.tokens(2) == harness.expected(2)


@pytest.mark.parametrize("num_blocks", [6, 8, 11])
@pytest.mark.parametrize("max_num_tokens", [4, 7, 64])
@pytest.mark.parametrize("reuse", [True, False])
def test_paused_sequences_go_on_with_the_same_tokens(num_blocks: int, max_num_tokens: int, reuse: bool) -> None:
    harness = Harness(
        policy=SchedulerPolicy.MAX_UTILIZATION,
        num_blocks=num_blocks,
        max_num_tokens=max_num_tokens,
        enable_reuse=reuse,
    )
    requests = [make_request(i, 2 + i, 12, streaming=True, seed=i) for i in range(8)]
    harness.submit(*requests)
    num_paused = 0
    for _ in range(500):
        harness.step()
        num_paused += harness.scheduler.num_paused
    assert num_paused > 0, "the pool was meant to be too small for all"
    assert_all_as_expected(harness, requests)


def test_the_latest_started_is_paused_and_resumes_first() -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    harness.submit(make_request(1, 8, 14), make_request(2, 8, 12))
    while not harness.scheduler.num_paused:
        harness.step()
    assert harness.scheduler.num_running == 1
    harness.submit(make_request(3, 2, 2, priority=1.0))
    harness.run_until_idle()
    started = [new.token_ids[:8] for step in harness.runner.launched for new in step.new_sequences]
    assert [started.index(harness.requests[i].input_token_ids) for i in (1, 2)] == [0, 1]
    assert started[2] == harness.requests[2].input_token_ids, "before the newcomer, however urgent"
    assert_all_as_expected(harness, list(harness.requests.values()))


def test_cached_tokens_are_those_of_the_first_start() -> None:
    """A paused sequence finds its own blocks again: those it has computed."""
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    harness.serve(make_request(1, list(range(9)), 1))
    harness.submit(make_request(2, list(range(9)), 14, streaming=True), make_request(3, list(range(50, 58)), 12))
    num_paused = 0
    for _ in range(100):
        harness.step()
        num_paused += harness.scheduler.num_paused
    assert num_paused > 0
    cached = [harness.final(number).request_perf_metrics.num_cached_tokens for number in (1, 2, 3)]  # type: ignore[union-attr]
    assert cached == [0, 8, 0]
    told = [result.num_cached_tokens for result in harness.results(2)]
    assert told == [8] + [0] * (len(told) - 1), "with the first result, and only there"


def test_a_paused_sequence_waits_for_its_outstanding_token() -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    harness.submit(make_request(1, 8, 14), make_request(2, 8, 12))
    while not harness.scheduler.num_paused:
        harness.step()
    num_started = sum(len(step.new_sequences) for step in harness.runner.launched)
    harness.run_until_idle()
    resumed = [new for step in harness.runner.launched for new in step.new_sequences][num_started]
    known = len(resumed.token_ids) - resumed.num_prompt_tokens
    assert resumed.token_ids == [*harness.requests[2].input_token_ids, *harness.expected(2)[:known]]


def test_a_paused_sequence_does_not_resume_before_its_token_is_known() -> None:
    scheduler = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=4, max_num_tokens=64).scheduler
    first, second = (Sequence(make_request(i, 7, 8), max_seq_len=64) for i in (1, 2))
    scheduler.add(first)
    scheduler.add(second)
    steps = [scheduler.schedule() for _ in range(3)]
    assert scheduler.num_paused == 1 and second.num_pending == 2, (
        "paused for the block that the first one's third needs"
    )
    scheduler.stop(first, FinishReason.CANCELLED)
    assert scheduler.schedule() is None
    outputs = [StepOutput(token_ids=[[5]] * len(step.sampling_rows)) for step in steps if step is not None]
    for step, output in zip(steps, outputs, strict=True):
        assert step is not None
        scheduler.update(step, output)
    resumed = scheduler.schedule()
    assert resumed is not None
    assert resumed.new_sequences[0].token_ids == [*second.request.input_token_ids, 5, 5]


def test_static_batch_admits_nobody_until_all_are_done() -> None:
    harness = Harness(policy=SchedulerPolicy.STATIC_BATCH, max_num_tokens=64)
    harness.submit(make_request(1, 4, 3), make_request(2, 4, 12))
    harness.step()
    harness.submit(make_request(3, 4, 3))
    while harness.num_finals(2) == 0:
        harness.step()
        assert harness.scheduler.num_running <= 2
        assert 3 not in harness.responses
    harness.run_until_idle()
    assert_all_as_expected(harness, list(harness.requests.values()))


def test_a_static_batch_may_need_several_steps_to_start() -> None:
    harness = Harness(policy=SchedulerPolicy.STATIC_BATCH, max_num_tokens=4)
    harness.submit(*(make_request(i, 4, 12) for i in range(4)))
    for _ in range(6):
        harness.step()
    assert harness.scheduler.num_running == 4


def test_what_did_not_fit_a_static_batch_waits_for_the_next() -> None:
    harness = Harness(policy=SchedulerPolicy.STATIC_BATCH, num_blocks=10, max_num_tokens=64)
    harness.submit(make_request(1, 12, 2), make_request(2, 4, 16), make_request(3, 12, 2))
    while harness.num_finals(2) == 0:
        harness.step()
        assert harness.scheduler.num_running <= 2
    assert harness.num_finals(1) == 1 and harness.num_finals(3) == 0
    harness.run_until_idle()
    assert_all_as_expected(harness, list(harness.requests.values()))


@pytest.mark.parametrize("policy", POLICIES)
def test_without_chunks_a_prompt_goes_whole(policy: SchedulerPolicy) -> None:
    harness = Harness(policy=policy, enable_chunked_context=False, max_num_tokens=12, enable_reuse=False)
    requests = [make_request(i, 3 + i, 8) for i in range(9)]
    harness.serve(*requests)
    assert_all_as_expected(harness, requests)
    whole = {len(request.input_token_ids) for request in requests}
    assert {part.num_tokens for step in harness.runner.launched for part in prefills(step)} == whole
    harness.serve(make_request(50, 13, 1))
    assert isinstance(harness.error(50), InvalidRequest) and "enable_chunked_context" in str(harness.error(50))


def test_without_chunks_a_paused_sequence_longer_than_a_step_still_resumes() -> None:
    harness = Harness(
        policy=SchedulerPolicy.MAX_UTILIZATION, enable_chunked_context=False, max_num_tokens=8, num_blocks=7
    )
    requests = [make_request(i, 7, 20) for i in range(4)]
    harness.serve(*requests)
    assert_all_as_expected(harness, requests)


def test_what_can_never_fit_is_refused_by_the_scheduler_itself() -> None:
    harness = Harness(num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match="5 KV cache blocks"):
        harness.scheduler.add(Sequence(make_request(1, 10, 8), max_seq_len=64))
    harness.scheduler.add(Sequence(make_request(2, 10, 7), max_seq_len=64))


def test_a_step_must_hold_a_token_of_every_row() -> None:
    with pytest.raises(ValueError, match="max_num_tokens"):
        Harness(max_batch_size=8, max_num_tokens=7)


def test_a_sequence_passes_through_its_states() -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=6, max_num_tokens=64)
    sequences = [Sequence(make_request(i, 8, 12), max_seq_len=64) for i in (1, 2)]
    seen: list[SequenceStatus] = []
    for sequence in sequences:
        harness.scheduler.add(sequence)
    for _ in range(40):
        if not seen or seen[-1] is not sequences[1].status:
            seen.append(sequences[1].status)
        scheduled = harness.scheduler.schedule()
        if scheduled is None:
            break
        handle: Any = harness.runner.forward(scheduled)
        harness.runner.sample(handle)
        harness.scheduler.update(scheduled, harness.runner.collect(handle))
    states = SequenceStatus
    assert seen == [states.WAITING, states.RUNNING, states.PAUSED, states.RUNNING, states.FINISHED]
