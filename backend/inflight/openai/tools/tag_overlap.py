"""How much of a text's end must be held back because a tag may begin there."""

from __future__ import annotations


def tag_overlap(text: str, tag: str, start: int = 0) -> int:
    """Length of the longest end of text[start:] that is a proper beginning of `tag`; 0 if there is no tag."""
    position = text.find(tag[0], max(start, len(text) - len(tag) + 1)) if tag else -1
    while position >= 0:
        if tag.startswith(text[position:]):
            return len(text) - position
        position = text.find(tag[0], position + 1)
    return 0
