"""Keywords that hold for values of any type: `type`, constants, references and combinations of schemas."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING, Any

from inflight.guides.schema.documents import Place
from inflight.guides.schema.facts import (
    ANY,
    Array,
    Boolean,
    Claim,
    Fact,
    Null,
    Number,
    Object,
    Rest,
    String,
    Union_,
    either,
    without,
)
from inflight.guides.schema.keyword_values import malformed
from inflight.guides.schema.keywords import TYPES

if TYPE_CHECKING:
    from inflight.guides.schema.expansion import Expansion


def unseen(union: Union_) -> Union_:
    """What a schema that does not hold lets through: no word of which items and properties keywords have looked at."""
    return tuple(
        replace(fact, seen=0)
        if isinstance(fact, Array)
        else replace(fact, seen=frozenset(), seen_patterns=(), has_seen_all=False)
        if isinstance(fact, Object)
        else fact
        for fact in union
    )


def read_in_place(expansion: Expansion, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
    if key in ("$ref", "$dynamicRef", "$recursiveRef"):
        return expansion.expand(Claim(expansion.documents.follow(place, key), holds))
    if key == "type":
        return _type(place, value, holds)
    if key in ("const", "enum"):
        if key == "enum" and not isinstance(value, list):
            raise malformed("must be a list", place, key)
        return _constants(expansion, place, key, value if key == "enum" else [value], holds)
    if key == "not":
        return unseen(expansion.expand(replace(expansion.at(place, key), holds=not holds)))
    if key == "if":
        return _condition(expansion, place, holds)
    if key in ("allOf", "anyOf", "oneOf"):
        if not isinstance(value, list) or not value:
            raise malformed("must be a list of schemas", place, key)
        claims = [expansion.at(place, key, i) for i in range(len(value))]
        denied = [replace(claim, holds=False) for claim in claims]
        if key == "oneOf":
            return _one_of(expansion, claims, denied, place, holds)
        if (key == "allOf") == holds:
            return expansion.every(claims if holds else denied, place, key)
        union = either(expansion.expand(claim) for claim in (claims if holds else denied))
        if holds and expansion.sees and 1 < len(claims) <= 4:
            groups = [g for n in range(2, len(claims) + 1) for g in combinations(claims, n)]
            union = either([union, *(expansion.every(list(group), place, key) for group in groups)])
        return union
    return None


def _condition(expansion: Expansion, place: Place, holds: bool) -> Union_:
    condition = expansion.at(place, "if")
    ways = []
    for keyword, is_met in (("then", True), ("else", False)):
        claims = [replace(condition, holds=is_met)]
        if keyword in place.schema:
            claims.append(replace(expansion.at(place, keyword), holds=holds))
        elif not holds:
            continue
        if claims[-1].place.schema is not (not claims[-1].holds):
            ways.append(expansion.every(claims, place, "if"))
    return either(ways)


def _one_of(expansion: Expansion, claims: list[Claim], denied: list[Claim], place: Place, holds: bool) -> Union_:
    if not holds:
        ways = [expansion.every(list(pair), place, "oneOf") for pair in combinations(claims, 2)]
        return unseen(either((expansion.every(denied, place, "oneOf"), *ways)))
    unions = [expansion.expand(claim) for claim in claims]
    ways = []
    for i, union in enumerate(unions):
        for j, other in enumerate(unions):
            if i != j:
                alone = tuple(fact for fact in union if not expansion.product((fact,), other, place, "oneOf"))
                both = tuple(fact for fact in union if fact not in alone)
                if both:
                    union = (*alone, *expansion.product(both, expansion.expand(denied[j]), place, "oneOf"))
        ways.append(union)
    return either(ways)


def _type(place: Place, value: Any, holds: bool) -> Union_:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(n, str) and n in (*TYPES, "integer") for n in names):
        raise malformed("names no type of JSON", place, "type")
    if holds:
        kept = [fact for fact in ANY if fact.type in names]
        return (*kept, *([Number(is_integer=True)] if "integer" in names and "number" not in names else []))
    left = [fact for fact in ANY if fact.type not in names]
    if "integer" in names and "number" not in names:
        left = [Number(is_fractional=True) if fact.type == "number" else fact for fact in left]
    return tuple(left)


def _constants(expansion: Expansion, place: Place, key: str, values: list[Any], holds: bool) -> Union_:
    nulls = [v for v in values if v is None]
    booleans = frozenset(v for v in values if isinstance(v, bool))
    numbers = frozenset(Fraction(str(v)) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool))
    strings = frozenset(v for v in values if isinstance(v, str))
    nested = [v for v in values if isinstance(v, (list, dict))]
    facts: list[Fact] = []
    if holds:
        facts += [Null()] if nulls else []
        facts += [Boolean(booleans)] if booleans else []
        facts += [Number(values=numbers)] if numbers else []
        facts += [String(values=strings)] if strings else []
        for number, value in enumerate(nested):
            at = f"{place.pointer}/{key}/{number}"
            if isinstance(value, list):
                items = tuple((i, i + 1, expansion.value(v, at)) for i, v in enumerate(value))
                facts.append(Array(len(value), len(value), items))
            else:
                named = tuple((name, expansion.value(v, at)) for name, v in value.items())
                rest = Rest(frozenset(value), (), expansion.nothing)
                facts.append(Object(named=named, rests=(rest,), required=tuple(value)))
        return tuple(facts)
    facts += [] if nulls else [Null()]
    facts += [Boolean(frozenset({False, True}) - booleans)] if len(booleans) < 2 else []
    facts += [Number(excluded=numbers), String(excluded=strings)]
    union: Union_ = (*facts, Array(), Object())
    for value in nested:
        union = expansion.product(union, _unlike(expansion, place, key, value), place, key)
    return union


def _unlike(expansion: Expansion, place: Place, key: str, value: Any) -> Union_:
    if isinstance(value, list):
        facts: list[Fact] = [Array(shortest=len(value) + 1)]
        facts += [Array(longest=len(value) - 1)] if value else []
        for i, v in enumerate(value):
            claim = replace(expansion.value(v, place.pointer), holds=False)
            facts.append(Array(i + 1, items=((i, i + 1, claim),)))
        return without("array", *facts)
    facts = [Object(fewest=len(value) + 1)]
    facts += [Object(named=((name, expansion.nothing),)) for name in value]
    facts += [
        Object(named=((name, replace(expansion.value(v, place.pointer), holds=False)),), required=(name,))
        for name, v in value.items()
    ]
    return without("object", *facts)
