"""What packages ask for, as it is installed beside this Python: for the bill of materials, and for environments that
tests make of it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def holding(asked: Iterable[str], extras: Iterable[str] = ()) -> list[Requirement]:
    """Those of the lines `asked` whose markers hold here, with these extras."""
    found = [Requirement(each) for each in asked]
    wanted = ("", *extras)
    return [each for each in found if not each.marker or any(each.marker.evaluate({"extra": name}) for name in wanted)]


def requirements(package: str, extras: Iterable[str] = ()) -> list[Requirement]:
    """What an installed package asks for here, with these extras; nothing of one that is not installed."""
    try:
        asked = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return holding(asked, extras)


def needed(asked: Iterable[Requirement]) -> set[str]:
    """The packages that these requirements lead to, of those that are not installed the names alone."""
    waiting = list(asked)
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        each = waiting.pop()
        key = (canonicalize_name(each.name), frozenset(each.extras))
        if key not in seen:
            seen.add(key)
            waiting += requirements(each.name, each.extras)
    return {name for name, _ in seen}
