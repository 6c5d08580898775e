"""Keywords of objects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inflight.guides.schema.documents import Place
from inflight.guides.schema.facts import ANY, Object, Rest, Union_, without
from inflight.guides.schema.keyword_values import malformed, names, refusal, whole
from inflight.guides.schema.patterns import translate

if TYPE_CHECKING:
    from inflight.guides.schema.expansion import Expansion


def read_object(expansion: Expansion, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
    schema = place.schema
    if key in ("minProperties", "maxProperties"):
        count = whole(place, key, value)
        if key == "minProperties":
            if not holds:
                return (Object(most=count - 1),) if count else ()
            return without("object", Object(fewest=count))
        return without("object", Object(most=count)) if holds else (Object(fewest=count + 1),)
    if key == "required":
        if isinstance(value, bool) and place.is_old:
            return ANY if holds else ()
        required = names(place, key, value)
        if holds:
            return without("object", Object(required=required))
        return tuple(Object(named=((name, expansion.nothing),)) for name in required)
    maps = ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies")
    if key in maps and not isinstance(value, dict):
        raise malformed("must be an object", place, key)
    if key == "properties":
        named = tuple((name, expansion.at(place, key, name)) for name in value)
        if holds:
            return without("object", Object(named=named, seen=frozenset(value)))
        return tuple(Object(named=((n, replace(c, holds=False)),), required=(n,)) for n, c in named)
    if key in ("dependentRequired", "dependentSchemas", "dependencies"):
        return _dependencies(expansion, place, key, value, holds)
    if key not in ("patternProperties", "additionalProperties", "propertyNames"):
        return None
    if not holds:
        if (
            key == "additionalProperties"
            and value is False
            and not schema.get("patternProperties")
            and not schema.get("properties")
        ):
            return (Object(fewest=1),)
        raise refusal("cannot be negated", place, key)
    if key == "patternProperties":
        # A name may be written in escapes, of which the library reads two for a character beyond the first plane.
        if any(max(map(ord, pattern), default=0) > 0xFFFF for pattern in value):
            raise refusal("names characters beyond the basic plane", place, key)
        found = tuple(
            (translate(pattern, f"{place.pointer}/{key}"), expansion.at(place, key, pattern)) for pattern in value
        )
        return without("object", Object(patterned=found, seen_patterns=tuple(pattern for pattern, _ in found)))
    if key == "additionalProperties":
        patterns = tuple(translate(p, place.pointer) for p in schema.get("patternProperties", {}))
        rest = Rest(frozenset(schema.get("properties", {})), patterns, expansion.at(place, key))
        return without("object", Object(rests=(rest,), has_seen_all=True))
    return without("object", Object(names=(expansion.at(place, key),)))


def _dependencies(expansion: Expansion, place: Place, key: str, value: dict[str, Any], holds: bool) -> Union_:
    union: Union_ = ANY if holds else ()
    for name, then in value.items():
        has: Union_ = (Object(required=(name,)),)
        met: Union_
        if isinstance(then, list) or key == "dependentRequired":
            also = names(place, key, then)
            met = (Object(required=also),) if holds else tuple(Object(named=((n, expansion.nothing),)) for n in also)
        else:
            met = expansion.expand(replace(expansion.at(place, key, name), holds=holds))
        met = expansion.product(has, met, place, key)
        if holds:
            lacks = without("object", Object(named=((name, expansion.nothing),)))
            union = expansion.product(union, (*lacks, *met), place, key)
        else:
            union += met
    return union
