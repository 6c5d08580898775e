"""What a tag may begin in is found, and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.asking.tools.tag_overlap import tag_at, tag_overlap


@given(st.text("ab", max_size=8), st.text("ab", max_size=6), st.integers(0, 8))
def test_it_is_the_longest_end_that_the_tag_begins_with(text: str, tag: str, start: int) -> None:
    ends = [length for length in range(1, len(tag)) if text[start:].endswith(tag[:length])]
    assert tag_overlap(text, tag, start) == max(ends, default=0)


def test_the_tag_at_a_place_is_known_once_it_is_whole() -> None:
    tags = ("<call>", "<calls>")
    assert tag_at("a<call>b", 1, 8, tags) == "<call>"
    assert tag_at("a<cal", 1, 5, tags) is None
    assert tag_at("a<call>b", 1, 4, tags) is None, "the text is only looked at up to there"
    assert tag_at("a<cat>", 1, 6, tags) == ""
    assert tag_at("a", 1, 1, tags) == ""
