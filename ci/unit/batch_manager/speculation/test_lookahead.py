"""Lookahead: windows, diagonals, and that it stops guessing in vain."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from harness import Harness, make_request

from inflight.batch_manager.speculation.lookahead import Lookahead
from inflight.speculative_decoding import NO_LOOKAHEAD, LookaheadDecodingConfig, SpeculativeDecodingConfig

Model = Callable[[list[int]], int]
"""The token that follows a text."""


def make_lookahead(window: int = 4, ngram: int = 3, verification: int = 4) -> Lookahead:
    return Lookahead(
        LookaheadDecodingConfig(max_window_size=window, max_ngram_size=ngram, max_verification_set_size=verification)
    )


def advance(lookahead: Lookahead, model: Model, text: list[int], most: int = 64) -> tuple[int, int]:
    """One step of the model; returns the numbers of drafts and of those that were accepted."""
    drafts = lookahead.propose(text, 0, most)
    inputs = [*text, *drafts]
    sampled = [model(inputs[:end]) for end in range(len(text), len(inputs) + 1)]
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == sampled[num_accepted]:
        num_accepted += 1
    text += sampled[: num_accepted + 1]
    if drafts:
        lookahead.account(len(drafts), num_accepted, len(text), 1)
        lookahead.learn(text, num_accepted + 1, sampled[num_accepted + 1 :])
    return len(drafts), num_accepted


def test_what_was_sampled_behind_a_wrong_draft_is_the_next_window() -> None:
    lookahead, text = make_lookahead(window=3, verification=0), [500]
    first = lookahead.propose(text, 0, 64)
    assert len(first) == 3 and set(first) == {500}, "any tokens of the text"
    lookahead.learn([500, 501], 1, [501, 502, 503])
    assert lookahead.propose([500, 501], 0, 64) == [501, 502, 503]


def test_guesses_of_a_deterministic_text_become_right() -> None:
    """A window of W guesses moves ahead of the text by Jacobi iteration alone."""
    lookahead, text = make_lookahead(window=4, verification=0), [3, 1, 4]

    def repeat(text: list[int]) -> int:
        return [7, 8, 9][len(text) % 3]  # by position, whatever the text

    counts = [advance(lookahead, repeat, text) for _ in range(4)]
    assert counts[0] == (4, 0) and counts[1] == (4, 4), "all guesses of the first step were right"


def test_diagonals_of_successive_windows_are_ngrams_of_the_pool() -> None:
    lookahead = make_lookahead(window=2, ngram=3, verification=4)
    text = [10]
    lookahead.propose(text, 0, 64)  # positions 1 and 2: 10, 10
    lookahead.learn([10, 20], 1, [21, 32])  # positions 2 and 3
    assert lookahead.propose([10, 20], 0, 64) == [21, 32]
    lookahead.learn([10, 20, 30], 1, [42, 53])  # behind 21 and 32: the diagonals are (10, 21, 42) and (10, 32, 53)
    found = [lookahead._pool.find(10, [expected]) for expected in (21, 32, 20)]
    assert found == [(21, 42), (32, 53), (20, 30)], "and the text's own"
    assert lookahead.propose([5, 10], 0, 64)[:2] == [20, 30], "the newest"


def test_an_ngram_stands_before_the_window() -> None:
    lookahead = make_lookahead(window=2, ngram=3)
    lookahead.propose([1, 2, 3], 0, 64)
    lookahead.learn([1, 2, 3], 1, [])
    assert lookahead.propose([5, 1], 0, 64)[:2] == [2, 3] and len(lookahead.propose([5, 1], 0, 64)) == 4


@pytest.mark.parametrize("num_pending", [1, 2])
def test_tokens_that_are_on_the_device_are_guessed_too(num_pending: int) -> None:
    lookahead = make_lookahead(window=2, ngram=3)
    lookahead.learn([1, 2, 3], 1, [])
    whole = lookahead.propose([5, 1], 0, 64)
    assert lookahead.propose([5, 1], num_pending, 64) == whole[num_pending:]
    assert lookahead.propose([5, 1], num_pending, 1) == whole[num_pending : num_pending + 1]


def test_it_pays_for_a_text_of_repeated_pieces_and_rests_for_any_other() -> None:
    pieces = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]
    rng = random.Random(1)
    truth = [0] + [token for _ in range(60) for token in rng.choice(pieces)]
    lookahead, text, num_steps = make_lookahead(window=4, ngram=8), [0], 0
    while len(text) < 400:
        advance(lookahead, lambda prefix: truth[len(prefix)], text)
        num_steps += 1
    assert num_steps < 120
    lookahead, text, num_drafts = make_lookahead(), [0], 0
    noise = [rng.randrange(10**6) for _ in range(5000)]
    while len(text) < 2000:
        num_drafts += advance(lookahead, lambda prefix: noise[len(prefix)] + sum(prefix[-3:]), text)[0]
    assert 0 < num_drafts < 200


def test_its_memory_does_not_grow_with_the_text() -> None:
    lookahead, text = make_lookahead(window=5, ngram=3, verification=2), [0]
    for _ in range(3000):
        text.append((text[-1] * 31 + 7) % 5000)
        lookahead.learn(text, 1, [text[-1] + 1] * 7)
    assert len(lookahead._diagonals) == 7
    assert len(lookahead._pool._followers) <= 1024
    assert all(len(found) <= 2 for found in lookahead._pool._followers.values())


def test_requests_with_it_are_answered_as_without() -> None:
    config = LookaheadDecodingConfig(max_window_size=3, max_ngram_size=2)
    harness = Harness(max_batch_size=8, max_num_tokens=32)
    harness.serve(make_request(1, 5, 40, lookahead_config=config), make_request(2, 7, 30))
    assert harness.tokens(1) == harness.expected(1) and harness.tokens(2) == harness.expected(2)
    metrics = harness.final(1).request_perf_metrics
    assert metrics is not None and metrics.total_draft_tokens > 0


def test_an_engine_may_have_it_for_all_requests() -> None:
    engines = SpeculativeDecodingConfig(lookahead=LookaheadDecodingConfig(max_window_size=3))
    harness = Harness(max_batch_size=8, max_num_tokens=32, speculative_decoding=engines)
    harness.serve(make_request(1, 5, 20), make_request(2, 5, 20, lookahead_config=NO_LOOKAHEAD))
    counts = [harness.final(number).request_perf_metrics for number in (1, 2)]
    assert [each is not None and each.total_draft_tokens > 0 for each in counts] == [True, False]
