"""What the scheduler does with a draft model, whose drafts it never sees. The fake runner's are right four times in
five, and it checks what the draft model is to catch up with."""

from __future__ import annotations

import pytest
from harness import Harness, drafted, make_request
from msgspec import structs

from inflight.config import SchedulerPolicy
from inflight.request import Request
from inflight.scheduler_output import DRAFTED, RowWork
from inflight.speculative_decoding import NO_SPECULATION, DraftTargetDecodingConfig, SpeculativeDecodingConfig

BY_MODEL = DraftTargetDecodingConfig(max_draft_len=4)
ENGINES = SpeculativeDecodingConfig(draft_target=BY_MODEL)


def make_harness(**options: object) -> Harness:
    usual = {"max_batch_size": 8, "max_num_tokens": 64, "num_blocks": 128, "speculative_decoding": ENGINES}
    return Harness(**{**usual, **options})  # type: ignore[arg-type]


def drafted_works(harness: Harness) -> list[RowWork]:
    return [work for step in harness.runner.launched for work in step.rows if DRAFTED in work.token_ids]


def test_tokens_are_the_same_in_fewer_steps_and_acceptance_is_reported() -> None:
    harness = make_harness()
    harness.serve(make_request(1, 5, 40))
    assert harness.tokens(1) == harness.expected(1)
    assert len(harness.runner.launched) < 25
    metrics = harness.final(1).request_perf_metrics
    assert metrics is not None and metrics.total_draft_tokens > metrics.total_accepted_draft_tokens > 20


def test_the_first_drafts_follow_a_token_that_only_the_device_knows() -> None:
    harness = make_harness()
    harness.serve(make_request(1, 5, 40))
    first, *later = drafted_works(harness)
    assert first.token_ids == [DRAFTED] * 2 and first.start == 5 and not first.unseen_token_ids
    assert all(work.token_ids[0] >= 0 and work.is_chosen for work in later)


def test_it_catches_up_with_the_last_draft_where_all_were_accepted() -> None:
    harness = make_harness()
    harness.serve(make_request(1, 5, 40))
    works = drafted_works(harness)
    ends = [work.start + work.num_tokens for work in works]
    for end, work in zip(ends, works[1:], strict=False):
        assert len(work.unseen_token_ids) == (work.start == end)
    assert any(work.unseen_token_ids for work in works)


def test_it_catches_up_with_steps_that_had_no_room_for_drafts() -> None:
    """A full batch has none; when the others have ended, there are many tokens to catch up with."""
    harness = make_harness(max_batch_size=2, speculative_decoding=NO_SPECULATION)
    harness.serve(
        make_request(1, 5, 40, draft_target_config=BY_MODEL), make_request(2, 5, 20, draft_target_config=BY_MODEL)
    )
    assert harness.tokens(1) == harness.expected(1) and harness.tokens(2) == harness.expected(2)
    assert max(len(work.unseen_token_ids) for work in drafted_works(harness)) > 15
    assert all(row.num_left_out == 0 for row in harness.runner.rows.values())


def test_catching_up_leaves_half_of_a_step_to_prompts() -> None:
    """What it has not caught up with by then is left out, which changes no token."""
    harness = make_harness(max_batch_size=3, max_num_tokens=12)
    harness.serve(make_request(1, 5, 40), make_request(2, 5, 16), make_request(3, 5, 18))
    assert all(harness.tokens(number) == harness.expected(number) for number in (1, 2, 3))
    for step in harness.runner.launched:
        assert step.num_tokens + sum(len(work.unseen_token_ids) for work in step.rows) <= 12


def test_given_drafts_come_first() -> None:
    harness = make_harness()
    harness.serve(drafted(1, 5, 40, "half right"))
    assert harness.tokens(1) == harness.expected(1)
    sources = [DRAFTED in work.token_ids for step in harness.runner.launched for work in step.rows if work.drafts]
    assert sources == sorted(sources) and any(sources) and not all(sources)


@pytest.mark.parametrize("policy", [SchedulerPolicy.GUARANTEED_NO_EVICT, SchedulerPolicy.MAX_UTILIZATION])
def test_many_in_short_memory(policy: SchedulerPolicy) -> None:
    harness = make_harness(num_blocks=24, max_num_tokens=24, policy=policy)
    requests: list[Request] = [make_request(number, 3 + number, 8 + 3 * number) for number in range(1, 11)]
    requests.append(structs.replace(make_request(11, 9, 20), num_return_sequences=3))
    requests.append(make_request(12, 9, 20, beam_width=2))
    harness.serve(*requests)
    assert all(harness.tokens(number) == harness.expected(number) for number in range(1, 12))
    assert all(harness.tokens(11, index) == harness.expected(11, index) for index in range(3))
    assert drafted_works(harness) and harness.kv_cache.num_free_blocks == 24
