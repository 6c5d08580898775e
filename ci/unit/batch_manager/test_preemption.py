"""priority_preemption: who is paused for whom, that nobody is paused in vain, and that no token depends on it."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness, make_request

from inflight.config import SchedulerPolicy

POLICIES = [SchedulerPolicy.GUARANTEED_NO_EVICT, SchedulerPolicy.MAX_UTILIZATION]


def preempting(**options: Any) -> Harness:
    return Harness(**{"priority_preemption": True, "max_num_tokens": 64, "enable_reuse": False, **options})


def starts(harness: Harness) -> list[int]:
    """Seeds of the sequences in the order in which they got a row, again after each pause."""
    return [new.sampling_config.seed for step in harness.runner.launched for new in step.new_sequences]


def request(number: int, priority: float, max_tokens: int = 20, **options: Any) -> Any:
    return make_request(number, 4, max_tokens, seed=number, priority=priority, **options)


def assert_all_as_expected(harness: Harness) -> None:
    for request_id in harness.requests:
        assert harness.tokens(request_id) == harness.expected(request_id)
        assert harness.num_finals(request_id) == 1
    assert harness.kv_cache.num_free_blocks == harness.kv_cache.num_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_the_least_important_that_started_last_gives_up_its_row(policy: SchedulerPolicy) -> None:
    harness = preempting(policy=policy, max_batch_size=3)
    harness.submit(request(1, 0.5), request(2, 0.2), request(3, 0.2))
    for _ in range(4):
        harness.step()
    harness.submit(request(4, 0.9, 6))
    harness.run_until_idle()
    assert starts(harness) == [1, 2, 3, 4, 3], "3 is paused, and goes on when 4 is done"
    assert_all_as_expected(harness)


@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_is_as_important_is_not_displaced(policy: SchedulerPolicy) -> None:
    harness = preempting(policy=policy, max_batch_size=2)
    harness.submit(request(1, 0.5), request(2, 0.5, 12))
    for _ in range(4):
        harness.step()
    harness.submit(request(3, 0.5))
    harness.run_until_idle()
    assert starts(harness) == [1, 2, 3]
    assert_all_as_expected(harness)


def test_a_paused_sequence_waits_for_all_that_are_more_important() -> None:
    harness = preempting(max_batch_size=1)
    harness.submit(request(1, 0.1))
    for _ in range(4):
        harness.step()
    harness.submit(request(2, 0.9, 4), request(3, 0.5, 4), request(4, 0.1, 4))
    harness.run_until_idle()
    assert starts(harness) == [1, 2, 3, 1, 4], "and goes before its equals"
    assert_all_as_expected(harness)


def test_blocks_are_taken_from_as_few_as_suffice() -> None:
    """Each of the three holds or keeps 6 blocks of 18 for its 24 tokens; the newcomer needs 12."""
    harness = preempting(num_blocks=18, max_batch_size=4)
    harness.submit(request(1, 0.1), request(2, 0.1), request(3, 0.1))
    for _ in range(4):
        harness.step()
    harness.submit(request(4, 0.9, 42))
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_paused) == (2, 2)
    harness.run_until_idle()
    assert_all_as_expected(harness)


def test_nobody_is_paused_in_vain() -> None:
    """The newcomer needs more than the less important one can give: it waits for the other to end."""
    harness = preempting(num_blocks=18, max_batch_size=4)
    harness.submit(request(1, 0.9, 36), request(2, 0.1))
    for _ in range(4):
        harness.step()
    harness.submit(request(3, 0.5, 42))
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_paused) == (2, 0)
    harness.run_until_idle()
    assert_all_as_expected(harness)


def test_blocks_that_others_hold_too_are_not_counted_as_gained() -> None:
    """Both hold the four blocks of the same prompt, of which pausing one of them frees none."""
    prompt = list(range(16))
    harness = preempting(num_blocks=10, max_batch_size=4, enable_reuse=True)
    harness.submit(make_request(1, prompt, 8, seed=1, priority=0.9))
    for _ in range(3):
        harness.step()
    harness.submit(make_request(2, prompt, 8, seed=2, priority=0.1))
    for _ in range(3):
        harness.step()
    harness.submit(make_request(3, list(range(50, 58)), 20, seed=3, priority=0.5))
    harness.step()
    assert harness.scheduler.num_paused == 0
    harness.run_until_idle()
    assert_all_as_expected(harness)


def test_what_was_reserved_because_a_block_of_a_window_is_shared_is_gained() -> None:
    """Both hold the same block, and may hold 2 each at a time. Pausing one frees none, but 2 are not kept any more."""
    prompt = list(range(9))
    harness = preempting(windows=(3,), num_blocks=4, block_size=8, max_num_tokens=5, enable_reuse=True)
    harness.serve(make_request(1, prompt, 1))
    harness.submit(*(make_request(number, prompt, 20, seed=number, priority=0.1) for number in (2, 3)))
    harness.step()
    assert harness.scheduler.num_running == 2
    harness.submit(make_request(4, list(range(50, 58)), 20, seed=4, priority=0.5))
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_paused) == (2, 1)
    harness.run_until_idle()
    assert_all_as_expected(harness)


def test_a_beam_search_is_displaced_as_a_whole() -> None:
    harness = preempting(max_batch_size=4, num_blocks=64)
    harness.submit(make_request(1, 4, 12, seed=1, priority=0.1, beam_width=3))
    for _ in range(4):
        harness.step()
    harness.submit(request(2, 0.9, num_return_sequences=2))
    for _ in range(2):
        harness.step()
    assert harness.scheduler.num_paused == 1
    harness.run_until_idle()
    assert [sorted(harness.tokens(2, index)) for index in (0, 1)] == [
        sorted(harness.expected(2, index)) for index in (0, 1)
    ]
    assert harness.final(1).output_token_ids == harness.expected_beams(1)[0].token_ids


def test_without_the_key_priority_only_orders_the_queue() -> None:
    harness = Harness(max_batch_size=1, max_num_tokens=64)
    harness.submit(request(1, 0.1))
    for _ in range(4):
        harness.step()
    harness.submit(request(2, 0.9, 4))
    harness.run_until_idle()
    assert starts(harness) == [1, 2]
