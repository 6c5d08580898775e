"""Stop signals: what a request that is stopped early is answered with."""

from __future__ import annotations

import pytest
from harness import Harness, make_request

from inflight.result import FinishReason


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


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("index", [0, 2])
def test_one_sequence_of_several_ends_and_the_others_go_on(index: int, steps: int) -> None:
    """Also the one that computes the prompt for all."""
    harness = Harness()
    harness.submit(make_request(1, 20, 12, num_return_sequences=3, seed=4), make_request(2, 4, 9))
    for _ in range(steps):
        harness.step()
    harness.manager.cancel_sequence(1, index)
    harness.run_until_idle()
    (cut,) = harness.results(1, index)
    assert (cut.finish_reason, cut.is_sequence_final) == (FinishReason.CANCELLED, True)
    assert cut.output_token_ids == harness.expected(1, index)[: len(cut.output_token_ids)]
    assert len(cut.output_token_ids) < 12
    for other in {0, 1, 2} - {index}:
        assert harness.tokens(1, other) == harness.expected(1, other)
    assert harness.num_finals(1) == 1
    assert harness.tokens(2) == harness.expected(2)
    assert harness.kv_cache.num_free_blocks == harness.kv_cache.num_blocks


def test_a_request_whose_sequences_are_all_cancelled_has_ended() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 30, num_return_sequences=2))
    for _ in range(4):
        harness.step()
    for index in (1, 0, 0, 2, -1):
        harness.manager.cancel_sequence(1, index)
    harness.step()
    assert harness.num_finals(1) == 1 and harness.reason(1) is FinishReason.CANCELLED


def test_a_beam_cannot_be_cancelled_alone() -> None:
    harness = Harness()
    harness.submit(make_request(1, 4, 6, beam_width=2))
    harness.step()
    harness.manager.cancel_sequence(1, 0)
    harness.run_until_idle()
    assert harness.reason(1) is FinishReason.LENGTH


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
