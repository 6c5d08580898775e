"""Requests that are refused, one sentence each, while their neighbours finish."""

from __future__ import annotations

import pytest
from harness import Harness, make_request
from replays import replay_after
from wrong_values import WRONG_REQUESTS

from inflight.errors import DuplicateRequest, InvalidRequest


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
        (make_request(1, [5, 97]), "vocabulary"),
        (make_request(1, [-1, 5]), "vocabulary"),
        (make_request(1, 4, 5, stop_words=[[]]), "stop_words"),
        (make_request(1, 4, 5, priority=3.0), "priority"),
        (make_request(1, 4, 5, allotted_time_ms=-1), "allotted_time_ms must not be negative, got -1"),
        (make_request(1, 40, 20), "KV cache"),
        (make_request(1, 4, 5, num_return_sequences=2, replay=replay_after([1])), "every sequence of the request"),
        (make_request(1, 4, 5, min_tokens=-1), "min_tokens must be >= 0, got -1"),
        *((make_request(1, 4, **{field: value}), sentence) for field, value, sentence in WRONG_REQUESTS),
    ],
)
def test_a_bad_request_is_refused_while_its_neighbours_finish(bad: object, words: str) -> None:
    harness = Harness(num_blocks=8, block_size=4)
    harness.submit(make_request(10, 4, 5), bad, make_request(11, 4, 5))  # type: ignore[arg-type]
    harness.run_until_idle()
    assert isinstance(harness.error(1), InvalidRequest) and words in str(harness.error(1))
    for request_id in (10, 11):
        assert harness.tokens(request_id) == harness.expected(request_id)
