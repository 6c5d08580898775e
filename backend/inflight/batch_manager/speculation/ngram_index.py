"""Where each n-gram of a text has stood last, so that what followed it there can be proposed again.

Kept up to date token by token: no look-up scans the text. Knows no sequences.
"""

from __future__ import annotations

INDEXED_AT_ONCE = 3072
"""Most n-grams that one call takes in: about a millisecond for those of three sizes. A long prompt is indexed over
several steps of its sequence, which meanwhile finds what is indexed."""
MAX_INDEXED = 2**18
"""Most n-grams of a text, some 50 MB: those of two sizes in 131072 tokens. Earlier ones are then forgotten."""
MIN_SIZE = 2
"""Shorter n-grams are not looked up unless the longest is: nearly every token has stood somewhere before."""


class NGramIndex:
    """Of one text, which only grows. Texts with the same beginning, such as the sequences of one prompt, share the
    index of that."""

    def __init__(self, max_size: int, beginning: NGramIndex | None = None, num_shared: int = 0) -> None:
        """`beginning`: where the first `num_shared` tokens are indexed, whichever of their texts comes first."""
        self._sizes = range(max_size, min(MIN_SIZE, max_size) - 1, -1)
        self._beginning = beginning
        self._num_shared = num_shared
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token after its last occurrence
        self._num_indexed = max(num_shared - 1, 0)  # tokens that are the end of indexed n-grams

    @property
    def num_ngrams(self) -> int:
        """N-grams that it holds itself."""
        return len(self._followers)

    def fork(self, num_shared: int) -> NGramIndex:
        """The index of another text with the same first `num_shared` tokens, which are indexed once, for both and all
        further forks. To be called with the same number, and first of all."""
        if self._beginning is None:
            self._beginning = NGramIndex(self._sizes[0])
            self._num_shared, self._num_indexed = num_shared, max(num_shared - 1, 0)
        return NGramIndex(self._sizes[0], self._beginning, num_shared)

    def extend(self, token_ids: list[int]) -> None:
        """Take in the next tokens of the text. The last one is left out, because nothing follows it yet."""
        if self._beginning is not None:
            self._beginning._index(token_ids, self._num_shared - 1)
        self._index(token_ids, len(token_ids) - 1)

    def _index(self, token_ids: list[int], most: int) -> None:
        end = min(most, self._num_indexed + INDEXED_AT_ONCE // len(self._sizes))
        for place in range(self._num_indexed + 1, end + 1):
            for size in self._sizes:
                if size <= place:
                    self._followers[tuple(token_ids[place - size : place])] = place
        self._num_indexed = max(end, self._num_indexed)
        if len(self._followers) > MAX_INDEXED:
            self._followers.clear()

    def continuation(self, token_ids: list[int], count: int) -> list[int]:
        """`count` tokens that followed the last occurrence of the text's end, longest n-gram first; none if it is new.

        Where that occurrence overlaps the end, the text repeats itself, and so does the continuation.
        """
        for size in self._sizes:
            ngram = tuple(token_ids[-size:])
            start = self._followers.get(ngram)
            if start is None and self._beginning is not None:
                start = self._beginning._followers.get(ngram)
            if start is not None and size <= len(token_ids):
                found = token_ids[start : start + count]
                while len(found) < count:
                    found.append(found[start - len(token_ids)])
                return found
        return []
