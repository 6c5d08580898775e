"""What a keyword must hold, and the refusals of one that does not."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from inflight.guides.refusal import GuideRefused
from inflight.guides.schema.documents import Place


def refusal(what: str, place: Place, key: str) -> GuideRefused:
    return GuideRefused(f"has a keyword that {what}", pointer=place.pointer, keyword=key)


def malformed(what: str, place: Place, key: str) -> GuideRefused:
    return GuideRefused(f"has a keyword that {what}", pointer=place.pointer, keyword=key, is_final=True)


def number(place: Place, key: str, value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (float("inf"), float("-inf")):
        raise malformed("must be a number", place, key)
    return Fraction(str(value))


def whole(place: Place, key: str, value: Any) -> int:
    found = number(place, key, value)
    if found.denominator != 1 or not 0 <= found <= 2**31:
        raise malformed(f"must be an integer from 0 to {2**31}", place, key)
    return int(found)


def names(place: Place, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise malformed("must be a list of names", place, key)
    return tuple(dict.fromkeys(value))
