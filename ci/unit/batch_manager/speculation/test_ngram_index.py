"""NGramIndex: the same as a scan of the whole text, however it was taken in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.batch_manager.speculation import ngram_index
from inflight.batch_manager.speculation.ngram_index import NGramIndex

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def scan(text: list[int], max_size: int, count: int) -> list[int]:
    """From the last occurrence of the longest run of last tokens, which may overlap the end."""
    for size in range(max_size, min(2, max_size) - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                following = text[end:]
                return [following[i % len(following)] for i in range(count)]
    return []


@given(text=TEXTS, max_size=st.integers(1, 5), count=st.integers(1, 9), piece=st.integers(1, 7))
def test_a_continuation_is_what_followed_last_time(text: list[int], max_size: int, count: int, piece: int) -> None:
    index = NGramIndex(max_size)
    for end in range(1, len(text), piece):
        index.extend(text[:end])
    index.extend(text)
    assert index.continuation(text, count) == scan(text, max_size, count)


def test_a_new_text_has_no_continuation() -> None:
    index = NGramIndex(3)
    index.extend(list(range(50)))
    assert index.continuation(list(range(50)), 4) == []


def test_a_long_text_is_taken_in_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_index, "INDEXED_AT_ONCE", 20)
    text = [*range(30), 20, 21, 22]
    index = NGramIndex(3)
    found = []
    for _ in range(4):
        index.extend(text)
        found.append(index.continuation(text, 2))
    assert found == [[], [], [23, 24], [23, 24]]


def test_more_sizes_take_in_less_text_at_once() -> None:
    """So that no request makes a step long for all others."""
    text = [*range(3000), 7, 8]
    few, many = NGramIndex(3), NGramIndex(16)
    few.extend(text[:1500])
    few.extend(text)
    many.extend(text[:1500])
    many.extend(text)
    assert len(many._followers) <= 2 * ngram_index.INDEXED_AT_ONCE
    assert len(few._followers) <= 2 * ngram_index.INDEXED_AT_ONCE


def test_earlier_text_is_forgotten_where_there_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence of a request has an index of its own: 16 sizes of a long prompt take gigabytes for a full batch."""
    monkeypatch.setattr(ngram_index, "MAX_INDEXED", 100)
    index, text = NGramIndex(3), list(range(400))
    for end in range(1, 401):
        index.extend(text[:end])
        assert len(index._followers) <= 100
    assert index.continuation([*text, 390, 391], 2) == [392, 393]


@given(
    prompt=TEXTS,
    ends=st.lists(TEXTS, min_size=2, max_size=3),
    max_size=st.integers(1, 5),
    count=st.integers(1, 9),
)
def test_texts_that_share_their_beginning_are_found_in_as_ever(
    prompt: list[int], ends: list[list[int]], max_size: int, count: int
) -> None:
    first = NGramIndex(max_size)
    indices = [first, *(first.fork(len(prompt)) for _ in ends[1:])]
    for length in range(41):
        for index, end in zip(indices, ends, strict=True):
            text = [*prompt, *end[:length]]
            index.extend(text)
            assert index.continuation(text, count) == scan(text, max_size, count)


def test_a_prompt_is_indexed_once_for_all_sequences_of_a_request() -> None:
    """Eight of 512 prompt and 33 other tokens: 1547 n-grams, where eight indices of their own have 8680."""
    prompt = list(range(512))
    alone, first = NGramIndex(3), NGramIndex(3)
    shared = [first, *(first.fork(len(prompt)) for _ in range(7))]
    alone.extend(prompt)
    for number, index in enumerate(shared):
        index.extend([*prompt, *range(1000 * number, 1000 * number + 33)])
    assert alone.num_ngrams == 510 + 509
    assert first._beginning is not None
    assert first._beginning.num_ngrams == alone.num_ngrams
    assert sum(index.num_ngrams for index in shared) == 8 * 33 * 2
