"""Keywords of numbers and strings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inflight.guides.schema import formats
from inflight.guides.schema.automata import Unread, combined
from inflight.guides.schema.documents import Place
from inflight.guides.schema.facts import ANY, Fact, Number, String, Union_, without
from inflight.guides.schema.keyword_values import malformed, number, refusal, whole
from inflight.guides.schema.patterns import translate

if TYPE_CHECKING:
    from inflight.guides.schema.expansion import Expansion


def read_scalar(expansion: Expansion, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
    fact: Fact
    if key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(value, bool) and key.startswith("ex"):
            return ANY if holds else ()
        beside = place.schema.get("exclusive" + key[:1].upper() + key[1:])
        bound, is_open = number(place, key, value), key.startswith("ex") or beside is True
        is_low = key.lower().endswith("minimum") == holds
        is_open = is_open == holds
        fact = Number(low=bound, is_low_open=is_open) if is_low else Number(high=bound, is_high_open=is_open)
        return without("number", fact) if holds else (fact,)
    if key == "multipleOf":
        step = number(place, key, value)
        if step <= 0:
            raise malformed("must be above zero", place, key)
        if not holds:
            if step == 1:
                return (Number(is_fractional=True),)
            raise refusal("cannot be negated", place, key)
        return without("number", Number(step=step))
    if key in ("minLength", "maxLength"):
        length = whole(place, key, value)
        if key == "minLength":
            if not holds:
                return (String(longest=length - 1),) if length else ()
            return without("string", String(shortest=length))
        return without("string", String(longest=length)) if holds else (String(shortest=length + 1),)
    if key == "pattern":
        pattern = translate(value, place.pointer)
        if holds:
            return without("string", String(patterns=(pattern,)))
        try:
            others = combined((pattern,), lambda flags: not flags[0], expansion.spend(place.pointer, key))
        except Unread:
            raise refusal("is too large to be negated", place, key) from None
        return () if others is None else (String(patterns=(others,)),)
    if key == "format":
        if not isinstance(value, str):
            raise malformed("must be text", place, key)
        if value in formats.REFUSED:
            raise refusal(f"names the format {value!r}, which is not enforced", place, key)
        if value not in formats.PATTERNS and value not in formats.OF_LIBRARY:
            return ANY if holds else ()
        if not holds:
            raise refusal("cannot be negated", place, key)
        if value in formats.PATTERNS:
            return without("string", String(patterns=formats.PATTERNS[value]))
        return without("string", String(formats=(value,)))
    return None
