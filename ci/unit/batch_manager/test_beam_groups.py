"""Beam searches in the Scheduler and GptManager, on a runner without a network: rows, blocks, pauses and ends.

Run: pytest ci/unit/batch_manager/test_beam_groups.py
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from harness import Harness, make_request

from inflight.batch_manager.beam_search import BeamSearch, Candidates
from inflight.config import SchedulerPolicy
from inflight.request import Request
from inflight.result import FinishReason
from inflight.sequence_seed import sequence_seed


def beam_request(request_id: int, prompt: int = 6, max_tokens: int = 8, width: int = 3, **options: Any) -> Request:
    options.setdefault("num_return_sequences", width)
    return make_request(request_id, prompt, max_tokens, beam_width=width, **options)


def check(harness: Harness, request_id: int) -> None:
    expected = harness.expected_beams(request_id)
    assert harness.num_finals(request_id) == 1
    for index, beam in enumerate(expected):
        (result,) = harness.results(request_id, index)
        assert result.output_token_ids == beam.token_ids and result.is_sequence_final
        assert result.cum_log_prob == float(beam.total)


def test_beams_wait_for_each_choice_and_other_rows_do_not() -> None:
    harness = Harness(max_batch_size=4)
    harness.serve(make_request(1, 4, 30), beam_request(2))
    check(harness, 2)
    assert harness.tokens(1) == harness.expected(1)
    rows = [{work.row for work in step.rows} for step in harness.runner.launched]
    assert all(0 in step for step in rows[:30]), "the request without beams is in every step"
    with_beams = [number for number, step in enumerate(rows) if step - {0}]
    assert all(later - number >= 2 for number, later in itertools.pairwise(with_beams))


def test_beams_share_full_blocks_and_copy_the_last() -> None:
    harness = Harness(num_blocks=64, max_batch_size=4, max_num_tokens=32)
    harness.submit(beam_request(1, prompt=22, max_tokens=3, width=4))
    peak = 0
    for _ in range(30):
        harness.step()
        peak = max(peak, harness.kv_cache.num_used_blocks)
    check(harness, 1)
    assert peak == 5 + 4, "5 full blocks for all, and one of its own for each"
    copies = [pair for step in harness.runner.launched for pair in step.block_copies]
    assert len(copies) >= 3 and harness.kv_cache.num_used_blocks == 0


def test_a_search_needs_a_row_and_blocks_for_each_beam() -> None:
    harness = Harness(max_batch_size=4)
    harness.submit(make_request(1, 4, 12), make_request(2, 4, 12), beam_request(3), make_request(4, 4, 2))
    harness.step()
    harness.step()
    assert {work.row for work in harness.runner.launched[-1].rows} == {0, 1}, "two rows are free, and it needs three"
    harness.run_until_idle()
    check(harness, 3)
    too_large = Harness(num_blocks=12, max_batch_size=4)
    too_large.serve(beam_request(1, prompt=12, max_tokens=8, width=3))
    assert "needs 15 KV cache blocks" in str(too_large.error(1))


@pytest.mark.parametrize("enable_reuse", [True, False])
def test_a_search_that_is_paused_goes_on_with_the_same_beams(enable_reuse: bool) -> None:
    harness = Harness(
        num_blocks=24, max_batch_size=8, policy=SchedulerPolicy.MAX_UTILIZATION, enable_reuse=enable_reuse
    )
    harness.submit(make_request(1, 8, 40), beam_request(2, 6, 24), beam_request(3, 9, 20), make_request(4, 5, 30))
    paused = 0
    for _ in range(400):
        harness.step()
        paused += harness.scheduler.num_paused
    assert paused and not harness.manager.num_active_requests
    for request_id in (2, 3):
        check(harness, request_id)
    assert harness.tokens(1) == harness.expected(1) and harness.tokens(4) == harness.expected(4)
    assert harness.kv_cache.num_used_blocks == 0


def check_hashes(harness: Harness) -> None:
    """The hashes that a beam keeps of its blocks are those of its present text."""
    pool, size = harness.kv_cache._pool, harness.kv_cache.block_size
    for active in harness.manager._active.values():
        for sequence in active.sequences:
            parent = pool.hash_root(b"")
            for index, block_hash in enumerate(sequence.block_hashes):
                parent = pool.hash_block(parent, sequence.token_ids[index * size : (index + 1) * size])
                assert block_hash == parent, "a prefix would be reused for another text"


@pytest.mark.parametrize("number", range(6))
def test_a_choice_that_arrives_in_a_pause_changes_what_is_reused(number: int) -> None:
    policy = SchedulerPolicy.MAX_UTILIZATION
    harness = Harness(block_size=1, num_blocks=93 + number, max_batch_size=12, max_num_tokens=64, policy=policy)
    searches = [beam_request(10 + index, 3, 20, width=3 + index, length_penalty=0.0) for index in range(2)]
    harness.submit(*(make_request(1 + index, 3 + index, 30) for index in range(5)), *searches)
    paused = 0
    while harness.queue or harness.manager.num_active_requests:
        harness.step()
        check_hashes(harness)
        paused += harness.scheduler.num_paused
    assert paused and harness.kv_cache.num_used_blocks == 0
    for request in searches:
        check(harness, request.request_id)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6, 9])
def test_a_stop_ends_the_whole_search_with_the_best_so_far(num_steps: int) -> None:
    harness = Harness(max_batch_size=4)
    harness.submit(beam_request(1, max_tokens=20, num_return_sequences=2))
    for _ in range(num_steps):
        harness.step()
    harness.stops = {1}
    harness.run_until_idle()
    if not num_steps:
        check(harness, 1)
        return
    assert harness.num_finals(1) == 1
    for index in range(2):
        (result,) = harness.results(1, index)
        assert result.finish_reason is FinishReason.CANCELLED and len(result.output_token_ids) <= num_steps
    assert harness.kv_cache.num_used_blocks == 0 and harness.scheduler.num_running == 0
    assert harness.maxima[-1] <= 4
    harness.serve(make_request(2, 4, 4))
    assert harness.maxima[-1] == 4, "its rows are free again"


def test_a_row_that_cannot_go_on_fails_the_search_once() -> None:
    harness = Harness(runner={"row_error": lambda row: "broken" if len(row.token_ids) == 9 and row.is_beam else None})
    harness.serve(beam_request(1), make_request(2, 4, 12))
    assert "broken" in str(harness.error(1)) and len(harness.responses[1]) == 1
    assert harness.tokens(2) == harness.expected(2) and harness.kv_cache.num_used_blocks == 0


def test_other_requests_have_streams_of_their_own_beside_beams() -> None:
    harness = Harness(max_batch_size=8, max_num_tokens=16)
    harness.serve(make_request(1, 7, 9, seed=3, num_return_sequences=2), beam_request(2, 7, 9, width=2, end_ids=[1, 2]))
    check(harness, 2)
    assert harness.tokens(1, 1) == harness.expected(1, 1) and sequence_seed(3, 1) != 3


@pytest.mark.parametrize(
    "options",
    [
        {"beam_width_array": [1, 3, 2]},
        {"beam_width_array": [3, 1, 1, 3]},
        {"beam_search_diversity_rate": 0.75},
        {"beam_width_array": [2, 3], "beam_search_diversity_rate": 1.5, "end_ids": [3, 40], "min_tokens": 2},
        {"stop_words": [[token] for token in range(0, 97, 5)]},
    ],
)
@pytest.mark.parametrize("policy", [SchedulerPolicy.GUARANTEED_NO_EVICT, SchedulerPolicy.MAX_UTILIZATION])
def test_beams_of_all_kinds_move_their_blocks_rightly(options: dict[str, Any], policy: SchedulerPolicy) -> None:
    harness = Harness(num_blocks=30, max_batch_size=8, policy=policy)
    names = range(2, 5)
    searches = [beam_request(i, 3 + i, 18, num_return_sequences=2, **options) for i in names]
    harness.serve(make_request(1, 8, 40), *searches)
    for request_id in names:
        check(harness, request_id)
    assert harness.tokens(1) == harness.expected(1) and harness.kv_cache.num_used_blocks == 0


def test_a_stream_holds_what_the_search_would_end_with() -> None:
    harness = Harness(max_batch_size=8)
    harness.submit(beam_request(1, streaming=True, log_probs=True), beam_request(2, streaming=False))
    searches: list[list[list[int]]] = []
    while not harness.num_finals(1):
        num_before = len(harness.responses.get(1, []))
        harness.step()
        results = [result for result, _, _ in harness.responses.get(1, [])[num_before:] if result is not None]
        assert [result.sequence_index for result in results] == list(range(len(results)))
        assert all(len(result.log_probs) == len(result.output_token_ids) for result in results)
        assert all(result.cum_log_prob == pytest.approx(sum(result.log_probs), abs=1e-4) for result in results)
        if results:
            searches.append([result.output_token_ids for result in results])
    assert [len(tokens[0]) for tokens in searches[:-1]] == list(range(1, 8)), "one response of each after each choice"
    given_up = [
        old
        for before, now in itertools.pairwise(searches)
        for old, new in zip(before, now, strict=True)
        if new[: len(old)] != old
    ]
    assert given_up, "otherwise each response would only add to the one before"
    assert searches[-1] == [beam.token_ids for beam in harness.expected_beams(1)]
    harness.run_until_idle()
    assert len(harness.responses[2]) == 3 and harness.kv_cache.num_used_blocks == 0


def test_a_stream_that_is_stopped_ends_with_what_it_held() -> None:
    harness = Harness()
    harness.submit(beam_request(1, max_tokens=40, streaming=True))
    for _ in range(9):
        harness.step()
    held = {index: harness.results(1, index)[-1].output_token_ids for index in range(3)}
    harness.stops = {1}
    harness.run_until_idle()
    assert {index: harness.results(1, index)[-1].output_token_ids for index in range(3)} == held
    assert harness.num_finals(1) == 1 and harness.reason(1) is FinishReason.CANCELLED


def search(**options: Any) -> BeamSearch:
    return BeamSearch(
        **{
            "width": 2,
            "length_penalty": 1.0,
            "early_stopping": 0,
            "end_ids": frozenset({9}),
            "max_tokens": 4,
            **options,
        }
    )


def test_equal_sums_are_ordered_by_beam_and_token() -> None:
    found = search()
    found.advance({0: Candidates(token_ids=[5, 3, 4, 1], log_probs=[-1.0, -1.0, -1.0, -1.0])})
    assert [beam.token_ids for beam in found.beams] == [[1], [3]]
    assert [(beam.slot, beam.parent) for beam in found.beams] == [(0, 0), (1, 0)]
    equal = Candidates(token_ids=[7, 6, 5, 4], log_probs=[-1.0, -1.0, -2.0, -2.0])
    found.advance({0: equal, 1: equal})
    assert [beam.token_ids for beam in found.beams] == [[1, 6], [1, 7]]
    assert [(beam.slot, beam.parent) for beam in found.beams] == [(0, 0), (1, 0)]


def test_a_child_stays_in_the_slot_of_its_parent() -> None:
    found = search()
    found.advance({0: Candidates(token_ids=[1, 2, 3, 4], log_probs=[-1.0, -1.5, -5.0, -6.0])})
    low, high = [-3.0, -4.0, -5.0, -6.0], [-0.1, -4.0, -5.0, -6.0]
    tokens = [1, 2, 3, 4]
    found.advance({0: Candidates(token_ids=tokens, log_probs=low), 1: Candidates(token_ids=tokens, log_probs=high)})
    assert [(beam.slot, beam.parent, beam.token_ids) for beam in found.beams] == [(1, 1, [2, 1]), (0, 0, [1, 1])]


@pytest.mark.parametrize(("early_stopping", "is_done"), [(1, True), (0, True), (2, False)])
def test_when_a_search_is_done(early_stopping: int, is_done: bool) -> None:
    """Two hypotheses of score -1 and -1.2, and a best beam of -3: no rival now, but with length penalty later."""
    found = search(early_stopping=early_stopping, end_ids=frozenset({8, 9}))
    found.advance(
        {0: Candidates(token_ids=[9, 8, 1, 2, 3, 4], log_probs=[-1.0, -1.2, -3.0, -3.5, -4.0, -5.0])},
    )
    assert [hypothesis.token_ids for hypothesis in found.hypotheses] == [[9], [8]]
    assert found.is_done is is_done


def test_forbidden_tokens_leave_fewer_beams_or_none() -> None:
    found = search(width=3)
    nothing = -np.inf
    found.advance({0: Candidates(token_ids=[1, 2, 3, 4, 5, 6], log_probs=[-1.0, -2.0, *[nothing] * 4])})
    assert [beam.token_ids for beam in found.beams] == [[1], [2]] and not found.is_done
    empty = Candidates(token_ids=[1, 2, 3, 4, 5, 6], log_probs=[nothing] * 6)
    found.advance({beam.slot: empty for beam in found.beams})
    assert found.is_done and [beam.token_ids for beam in found.results(3)] == [[1], [2]]


def test_diversity_lifts_continuations_of_lower_beams_and_no_score() -> None:
    """Sums -1 and -2, then the best continuations have -1.1, -1.2, -2.9, -3.9, and a rate of 2 lifts the last two."""
    tokens, near, far = [1, 2, 3, 4], [-0.1, -0.2, -9.0, -9.0], [-0.9, -1.9, -9.0, -9.0]
    for rate, expected in ((0.0, [[1, 1], [1, 2]]), (1.75, [[1, 1], [2, 1]]), (2.0, [[2, 1], [1, 1]])):
        found = search(diversity_rate=rate)
        found.advance({0: Candidates(token_ids=tokens, log_probs=[-1.0, -2.0, -9.0, -9.0])})
        found.advance({0: Candidates(token_ids=tokens, log_probs=near), 1: Candidates(token_ids=tokens, log_probs=far)})
        assert [beam.token_ids for beam in found.beams] == expected
        assert [beam.total for beam in found.beams] == pytest.approx([sum(beam.log_probs) for beam in found.beams])


def test_the_last_width_holds_for_all_later_steps() -> None:
    found = search(width=3, widths=[1, 3, 2], max_tokens=9)
    tokens, log_probs = list(range(1, 7)), [-float(place) for place in range(1, 7)]
    widths = []
    for _ in range(5):
        found.advance({beam.slot: Candidates(token_ids=tokens, log_probs=log_probs) for beam in found.beams})
        widths.append(len(found.beams))
        assert len({beam.slot for beam in found.beams}) == len(found.beams)
    assert widths == [1, 3, 2, 2, 2]


def test_a_stop_word_ends_a_hypothesis_unless_it_comes_too_early() -> None:
    found = search(stop_words={4: [[4, 4], [7, 1, 4], [4]]}, min_tokens=2, max_tokens=9)
    found.advance({0: Candidates(token_ids=[1, 4, 2, 3], log_probs=[-1.0, -1.1, -5.0, -6.0])})
    assert not found.hypotheses and [beam.token_ids for beam in found.beams] == [[1], [4]]
    ended = Candidates(token_ids=[4, 3, 2, 1], log_probs=[-0.1, -1.0, -2.0, -3.0])
    found.advance({beam.slot: ended for beam in found.beams})
    assert [beam.token_ids for beam in found.hypotheses] == [[1, 4], [4, 4]]
    assert all(beam.reason is FinishReason.STOP_WORDS for beam in found.hypotheses)


def test_the_first_token_of_a_stop_word_is_in_the_output() -> None:
    found = search(stop_words={4: [[1, 4]]}, max_tokens=9)
    found.advance({0: Candidates(token_ids=[4, 1, 2, 3], log_probs=[-1.0, -1.1, -5.0, -6.0])})
    assert not found.hypotheses, "what stands before it is the prompt"
