"""NGramPool: which n-gram is found, and that it stays small."""

from __future__ import annotations

from inflight.batch_manager.speculation import ngram_pool
from inflight.batch_manager.speculation.ngram_pool import NGramPool


def test_the_newest_ngram_is_found_unless_an_older_one_agrees_with_more_expected_tokens() -> None:
    pool = NGramPool(2)
    pool.add((1, 2, 3))
    pool.add((1, 4, 5))
    assert pool.find(1, []) == (4, 5)
    assert pool.find(1, [2, 9]) == (2, 3)
    assert pool.find(1, [4, 3]) == (4, 5)
    assert pool.find(2, [3]) == ()


def test_an_ngram_that_comes_again_is_the_newest_and_the_oldest_is_given_up() -> None:
    pool = NGramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert pool.find(1, [2]) == (2, 3)
    assert pool.find(1, [4]) == (6, 7), "it was given up"


def test_first_tokens_that_get_none_for_long_are_forgotten() -> None:
    pool, most = NGramPool(4), ngram_pool.MAX_FIRST_TOKENS
    pool.add((0, 1))
    for first in range(1, most):
        pool.add((first, 1))
    pool.add((0, 2))
    pool.add((most, 1))
    assert pool.find(0, []) == (2,) and pool.find(1, []) == () and pool.find(2, []) == (1,)


def test_an_empty_set_keeps_nothing() -> None:
    pool = NGramPool(0)
    pool.add((1, 2))
    assert pool.find(1, []) == ()
