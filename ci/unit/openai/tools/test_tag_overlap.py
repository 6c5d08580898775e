"""What a tag may begin in is found, and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.openai.tools.tag_overlap import tag_overlap


@given(st.text("ab", max_size=8), st.text("ab", max_size=6), st.integers(0, 8))
def test_it_is_the_longest_end_that_the_tag_begins_with(text: str, tag: str, start: int) -> None:
    ends = [length for length in range(1, len(tag)) if text[start:].endswith(tag[:length])]
    assert tag_overlap(text, tag, start) == max(ends, default=0)
