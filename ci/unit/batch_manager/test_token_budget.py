"""Chunks of prompts that follow a target of latency: on a device in virtual time, and told to every rank.

pytest ci/unit/batch_manager/test_token_budget.py
"""

from __future__ import annotations

import pytest
from harness import Harness, make_request
from simulated_device import Latencies, SimulatedDevice

from inflight.batch_manager.token_budget import TokenBudget
from inflight.scheduler_output import RowWork, SchedulerOutput

TARGET_US = 5_000.0
BASE_US, TOKEN_US = 1_000.0, 10.0
"""A step of 400 tokens takes the target."""
MAX_NUM_TOKENS = 4096


def mixed(num_tokens: int) -> SchedulerOutput:
    """A chunk of a prompt beside a decode, so many tokens in all."""
    rows = [RowWork(row=0, start=7, num_tokens=1, token_ids=[]), prefill(num_tokens - 1)]
    return SchedulerOutput(new_sequences=[], rows=rows)


def prefill(num_tokens: int) -> RowWork:
    return RowWork(row=1, start=0, num_tokens=num_tokens, token_ids=[1] * num_tokens)


def test_a_slow_step_lowers_the_budget_in_proportion_and_no_lower_than_half() -> None:
    budget = TokenBudget(1000, MAX_NUM_TOKENS)
    budget.step_ended(mixed(4000), 1250)
    assert budget.take_change() == 3200
    budget.step_ended(mixed(3200), 1_000_000)
    assert budget.take_change() == 1600


def test_steps_that_were_launched_before_a_cut_are_no_further_one() -> None:
    budget = TokenBudget(1000, MAX_NUM_TOKENS)
    for _ in range(3):
        budget.step_ended(mixed(4000), 1250)
    assert budget.take_change() == 3200


def test_a_fast_step_raises_the_budget_only_if_it_has_used_it_up() -> None:
    budget = TokenBudget(1000, MAX_NUM_TOKENS)
    budget.step_ended(mixed(2000), 2000)
    assert budget.take_change() == 1000
    budget.step_ended(mixed(500), 10)
    assert budget.take_change() == 0
    budget.step_ended(mixed(1000), 900)
    assert budget.take_change() == 1111
    for _ in range(100):
        budget.step_ended(mixed(MAX_NUM_TOKENS), 10)
    assert budget.take_change() == MAX_NUM_TOKENS


@pytest.mark.parametrize(
    "rows", [[prefill(4000)], [RowWork(row=0, start=7, num_tokens=1, token_ids=[])]], ids=["prompts", "decodes"]
)
def test_steps_without_prompts_and_those_nobody_waits_for_say_nothing(rows: list[RowWork]) -> None:
    budget = TokenBudget(1000, MAX_NUM_TOKENS)
    budget.step_ended(SchedulerOutput(new_sequences=[], rows=rows), 1_000_000)
    assert budget.take_change() == 0


def serve(budget: TokenBudget | None) -> tuple[list[float], Harness]:
    """Long prompts one after the other, beside a stream. Returns the times of the steps in which both had a part."""
    mixed_us: list[float] = []

    def duration(step: SchedulerOutput) -> float:
        time = BASE_US + TOKEN_US * sum(work.num_tokens for work in step.rows)
        if 0 < sum(work.is_prefill for work in step.rows) < len(step.rows):
            mixed_us.append(time)
        return time

    harness = Harness(
        num_blocks=1024,
        block_size=16,
        max_num_tokens=MAX_NUM_TOKENS,
        max_seq_len=4096,
        runner={"latencies": Latencies(device=duration, host=50.0, launch=10.0)},
        runner_type=SimulatedDevice,
        clock=lambda: harness.runner.now_ns,
    )
    if budget is not None:
        harness.callbacks.__dict__["step_ended"] = budget.step_ended
    harness.submit(make_request(1, 4, 150, streaming=True))
    harness.step()
    harness.submit(*(make_request(number, 2000, 3) for number in range(2, 14)))
    while harness.queue or harness.manager.num_active_requests:
        if budget is not None and (change := budget.take_change()):
            harness.manager.limit_tokens(change)
        harness.step()
    return mixed_us, harness


def test_prompts_come_in_chunks_that_keep_the_target_and_nobodys_tokens_change() -> None:
    without, _ = serve(None)
    assert max(without) > 4 * TARGET_US
    times, harness = serve(TokenBudget(round(TARGET_US * 1000), MAX_NUM_TOKENS))
    assert max(times[12:]) <= 1.05 * TARGET_US, times
    assert sum(times[12:]) >= 0.6 * TARGET_US * len(times[12:]), "chunks are as large as the target allows"
    for number in harness.requests:
        assert harness.tokens(number) == harness.expected(number)


def test_a_budget_below_the_decodes_leaves_prompts_a_block() -> None:
    harness = Harness(max_batch_size=4, max_num_tokens=64, block_size=4, num_blocks=64)
    harness.manager.limit_tokens(1)
    harness.submit(make_request(1, 4, 20), make_request(2, 4, 20))
    harness.step()
    harness.submit(make_request(3, 30, 4))
    harness.run_until_idle()
    chunks = [work.num_tokens for step in harness.runner.launched[1:] for work in step.rows if work.is_prefill]
    assert chunks and max(chunks) <= 4
    assert harness.tokens(3) == harness.expected(3)
