"""Tags in text that comes in pieces: which one stands somewhere, and how much of an end may be the beginning of one."""

from __future__ import annotations

from collections.abc import Iterable

MAX_TAG_CHARS = 128


def tag_at(text: str, position: int, end: int, tags: Iterable[str]) -> str | None:
    """Which of `tags` stands at `position`, "" if none does, None if text[:end] ends within what may be one."""
    is_open = False
    rest = text[position : min(end, position + MAX_TAG_CHARS)]
    for tag in tags:
        if rest.startswith(tag):
            return tag
        is_open = is_open or bool(rest and tag.startswith(rest))
    return None if is_open else ""


def tag_overlap(text: str, tag: str, start: int = 0) -> int:
    """Length of the longest end of text[start:] that is a proper beginning of `tag`; 0 if there is no tag."""
    position = text.find(tag[0], max(start, len(text) - len(tag) + 1)) if tag else -1
    while position >= 0:
        if tag.startswith(text[position:]):
            return len(text) - position
        position = text.find(tag[0], position + 1)
    return 0
