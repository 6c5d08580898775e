"""How much of a text's end must be held back because a tag may begin there."""

from __future__ import annotations


def tag_overlap(text: str, tag: str, start: int = 0) -> int:
    """Length of the longest end of text[start:] that is a proper beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text) - start), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
