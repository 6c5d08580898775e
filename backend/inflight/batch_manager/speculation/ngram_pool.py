"""N-grams that a model has generated, by their first token. Knows no sequences."""

from __future__ import annotations

MAX_FIRST_TOKENS = 1024
"""First tokens of which n-grams are kept; those that got none for the longest time are forgotten."""


class NGramPool:
    """The newest n-grams of each first token."""

    __slots__ = ("_followers", "_max_per_token")

    def __init__(self, max_per_token: int) -> None:
        """`max_per_token`: n-grams that are kept of one first token; 0 = none."""
        self._max_per_token = max_per_token
        self._followers: dict[int, list[tuple[int, ...]]] = {}  # what came after each first token, newest first

    def add(self, ngram: tuple[int, ...]) -> None:
        """The n-gram becomes the newest of its first token."""
        if not self._max_per_token:
            return
        first, following = ngram[0], ngram[1:]
        known = self._followers.pop(first, [])
        others = [each for each in known if each != following]
        self._followers[first] = [following, *others][: self._max_per_token]
        if len(self._followers) > MAX_FIRST_TOKENS:
            del self._followers[next(iter(self._followers))]

    def find(self, first: int, expected: list[int]) -> tuple[int, ...]:
        """What followed `first`: of several n-grams the one that begins with most of the `expected` tokens, of equally
        good ones the newest; empty if there is none."""
        return max(self._followers.get(first, ()), key=lambda each: _num_equal(each, expected), default=())


def _num_equal(tokens: tuple[int, ...], others: list[int]) -> int:
    """Number of leading tokens that are equal."""
    count = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        count += 1
    return count
