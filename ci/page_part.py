"""The part of a page that a program writes, between two lines that stay; and the page brought up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def with_part(page: str, begin: str, end: str, part: str) -> str:
    """The page with another part. Raises ValueError if it has no place for it."""
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the page lacks the lines {begin.strip()} and {end.strip()}, or one of them")
    return before + begin + "\n" + part + "\n" + end + after


def renew(path: Path, renewed: Callable[[str], str], stale: str) -> None:
    """With --write, bring a page up to date; else end with the message `stale` if it is not."""
    before = path.read_text(encoding="utf-8")
    after = renewed(before)
    if "--write" in sys.argv[1:]:
        path.write_text(after, encoding="utf-8")
    elif before != after:
        sys.exit(stale)
