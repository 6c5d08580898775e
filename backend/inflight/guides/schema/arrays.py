"""Keywords of arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inflight.guides.schema.documents import Place
from inflight.guides.schema.facts import ANY, Array, Claim, Contains, Fact, Union_, without
from inflight.guides.schema.keyword_values import malformed, refusal, whole

if TYPE_CHECKING:
    from inflight.guides.schema.expansion import Expansion


def read_array(expansion: Expansion, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
    schema = place.schema
    fact: Array
    if key in ("minItems", "maxItems"):
        length = whole(place, key, value)
        if key == "minItems":
            if not holds:
                return (Array(longest=length - 1),) if length else ()
            return without("array", Array(shortest=length))
        return without("array", Array(longest=length)) if holds else (Array(shortest=length + 1),)
    if key == "uniqueItems":
        if not isinstance(value, bool):
            raise malformed("must be true or false", place, key)
        if not value:
            return ANY if holds else ()
        if not holds:
            raise refusal("cannot be negated", place, key)
        return without("array", Array(is_unique=True))
    if key == "contains":
        return _contains(expansion, place, holds)
    claims: list[tuple[int, int | None, Claim]]
    if key == "prefixItems" or (key == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise malformed("must be a list of schemas", place, key)
        claims = [(i, i + 1, expansion.at(place, key, i)) for i in range(len(value))]
        fact = Array(items=tuple(claims), seen=len(value))
    elif key == "items":
        claims = [(len(schema.get("prefixItems", [])), None, expansion.at(place, key))]
        fact = Array(items=tuple(claims), seen=None)
    elif key == "additionalItems":
        if not isinstance(schema.get("items"), list):
            return ANY if holds else ()
        claims = [(len(schema["items"]), None, expansion.at(place, key))]
        fact = Array(items=tuple(claims), seen=None)
    else:
        return None
    if holds:
        return without("array", fact)
    denied = []
    for start, stop, claim in claims:
        claim = replace(claim, holds=False)
        if stop is not None:
            denied.append(Array(stop, items=((start, stop, claim),)))
        elif claim.place.schema is False:
            denied.append(Array(start + 1))
        elif start == 0:
            denied.append(Array(contains=(Contains(claim, 1, None),)))
        else:
            raise refusal("cannot be negated", place, key)
    return tuple(denied)


def _contains(expansion: Expansion, place: Place, holds: bool) -> Union_:
    claim = expansion.at(place, "contains")
    least = whole(place, "minContains", place.schema.get("minContains", 1))
    most = place.schema.get("maxContains")
    most = None if most is None else whole(place, "maxContains", most)
    if holds:
        if least == 0 and most is None:
            return ANY
        return without("array", Array(contains=(Contains(claim, least, most),)))
    facts: list[Fact] = [Array(contains=(Contains(claim, 0, least - 1),))] if least else []
    facts += [Array(contains=(Contains(claim, most + 1, None),))] if most is not None else []
    return tuple(facts)
