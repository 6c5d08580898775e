"""Facts about objects, written as schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, compress
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from inflight.guides.schema.automata import Unread, combined, divided
from inflight.guides.schema.facts import Claim, Object, Rest, String
from inflight.guides.schema.patterns import NUMBERED, anything_but, exactly

if TYPE_CHECKING:
    from inflight.guides.schema.writing import Schema, Writing

COUNTS = ("minProperties", "maxProperties")
MAX_OPTIONAL = 400
"""Properties of an object that may be left out: the library reads each of them as one that may come next, and stops at
2,000 of its readings (PARSER_LIMITS)."""
MAX_PATTERNS = 8
"""Patterns of the properties of one object."""
MAX_MATCHES = 64
"""Names of properties that are held against patterns, in one guide."""


def write_object(writing: Writing, fact: Object) -> Iterator[Schema]:
    if fact.names:
        fact = _named(writing, fact)
    if writing.closes_objects and (fact.named or fact.patterned) and not fact.rests:
        known = frozenset(name for name, _ in fact.named).union(fact.required)
        rest = Rest(known, tuple(pattern for pattern, _ in fact.patterned), writing.expansion.nothing)
        fact = replace(fact, rests=(rest,))
    names = dict.fromkeys(name for name, _ in fact.named)
    names |= dict.fromkeys(fact.required)
    for rest in fact.rests:
        names |= dict.fromkeys(sorted(rest.names))
    patterns = tuple(dict.fromkeys([p for p, _ in fact.patterned] + [p for r in fact.rests for p in r.patterns]))
    writing.num_matched += len(names) * len(patterns)
    if len(patterns) > MAX_PATTERNS or writing.num_matched > MAX_MATCHES:
        raise writing.refusal("has too many patterns of properties, or too many names beside", "patternProperties")
    properties: dict[str, Schema] = {}
    for name in names:
        claims = {claim for named, claim in fact.named if named == name}
        claims |= {claim for pattern, claim in fact.patterned if matches(pattern, name)}
        for rest in fact.rests:
            if name not in rest.names and not any(matches(pattern, name) for pattern in rest.patterns):
                claims.add(rest.claim)
        properties[name] = writing.write(frozenset(claims))
        if properties[name] is False and name in fact.required:
            yield False
            return
    schema: dict[str, Any] = {"type": "object"}
    kinds = _kinds(writing, fact, tuple(names), patterns)
    if kinds:
        schema["patternProperties"] = {
            expression: writing.write(
                frozenset(claim for own, claim in fact.patterned if own in matched)
                | frozenset(rest.claim for rest in fact.rests if not matched & set(rest.patterns))
            )
            for expression, matched in kinds.items()
        }
    others = writing.write(frozenset(rest.claim for rest in fact.rests))
    if others is False and kinds:
        # A pattern without values says nothing more, but the library holds listed properties against it, too.
        left = {pattern: one for pattern, one in schema["patternProperties"].items() if one is not False}
        del schema["patternProperties"]
        schema |= {"patternProperties": left} if left else {}
    if others is not True:
        schema["additionalProperties"] = others
    writing.has_known_among_others |= others is not False and bool(names or patterns)
    if patterns and any(map(NUMBERED.search, names)):
        raise writing.refusal("has a name with control characters beside patterns of names", "patternProperties")
    yield from _sized(writing, schema, properties, fact, others is False and "patternProperties" not in schema)


def _kinds(
    writing: Writing, fact: Object, names: tuple[str, ...], patterns: tuple[str, ...]
) -> dict[str, frozenset[str]]:
    """Expressions, no two of which match one name, and which of the patterns hold for the names of each. The library
    holds listed names to the patterns that they match: those of which something else is said are left out."""
    is_spared = any(
        matches(pattern, name)
        for rest in fact.rests
        for pattern in patterns
        for name in rest.names
        if pattern not in rest.patterns
    )
    if not is_spared and (len(patterns) < 2 or disjoint(patterns)):
        return {pattern: frozenset((pattern,)) for pattern in patterns}
    listed = (exactly(names),) if is_spared else ()
    try:
        found = divided(patterns + listed, writing.expansion.spend(writing.place, "patternProperties"))
    except Unread:
        raise writing.refusal("has patterns of properties that one name can match", "patternProperties") from None
    return {
        expression: frozenset(compress(patterns, flags))
        for flags, expression in found.items()
        if any(flags[: len(patterns)]) and not any(flags[len(patterns) :])
    }


def _sized(
    writing: Writing, schema: dict[str, Any], properties: dict[str, Schema], fact: Object, is_closed: bool
) -> Iterator[Schema]:
    """With the numbers of properties: llguidance counts where all those that are listed are required."""
    allowed = [name for name, value in properties.items() if value is not False]
    required = list(fact.required)
    fewest, most = fact.fewest, fact.most
    if len(required) >= fewest:
        fewest = 0
    if is_closed and most is not None and len(allowed) <= most:
        most = None
    if is_closed and len(allowed) < fewest:
        return
    optional = [name for name in allowed if name not in required]
    if len(optional) > MAX_OPTIONAL:
        raise writing.refusal(f"has more than {MAX_OPTIONAL} properties that may be left out", "properties")
    if not fewest and most is None:
        yield _listed(writing, schema, properties, required)
        return
    if len(optional) > 9:
        raise writing.refusal(
            "counts properties of which more than 9 are optional", *(COUNTS if fewest else COUNTS[::-1])
        )
    for count in range(len(optional) + 1):
        for chosen in combinations(optional, count):
            present = [name for name in allowed if name in required or name in chosen]
            if (most is not None and len(present) > most) or (is_closed and len(present) < fewest):
                continue
            listed = {name: properties[name] for name in present}
            if not is_closed:
                listed |= {name: False for name in properties if name not in present}
            made = _listed(writing, schema, listed, present)
            if not is_closed and fewest:
                made["minProperties"] = fewest
            if not is_closed and most is not None:
                made["maxProperties"] = most
            yield made


def _listed(
    writing: Writing, schema: dict[str, Any], properties: dict[str, Schema], required: list[str]
) -> dict[str, Any]:
    made = {"type": "object"}
    if properties:
        made["properties"] = properties  # type: ignore[assignment]
    return {**made, **schema, **({"required": required} if required else {})}


def _named(writing: Writing, fact: Object) -> Object:
    """`fact` without `propertyNames`: their strings are listed, or are a pattern."""
    nothing = writing.expansion.nothing
    kept = replace(fact, names=())
    facts = [f for f in writing.expansion.all_of(fact.names) if isinstance(f, String)]
    if not facts:
        return replace(kept, rests=(*kept.rests, Rest(frozenset(), (), nothing)))
    if len(facts) == 1 and facts[0] == String():
        return kept
    listed = [name for name, _ in fact.named] + list(fact.required)
    for name in listed:
        claim = writing.expansion.value(name, writing.place)
        if not writing.write(frozenset((*fact.names, claim))):
            kept = replace(kept, named=(*kept.named, (name, nothing)))
    if all(f.values is not None and not f.patterns + f.formats for f in facts):
        names = frozenset(name for f in facts for name in f.values or ())
        anything = tuple((name, Claim(replace(nothing.place, schema=True))) for name in sorted(names))
        return replace(kept, named=(*kept.named, *anything), rests=(*kept.rests, Rest(names, (), nothing)))
    if len(facts) == 1 and replace(facts[0], excluded=frozenset()) == String():
        forbidden = tuple((name, nothing) for name in sorted(facts[0].excluded))
        return replace(kept, named=(*kept.named, *forbidden))
    if any(one.formats for one in facts):
        raise writing.refusal("has formats of names", "propertyNames")
    rules = [_expressions(one) for one in facts]
    patterns = tuple(dict.fromkeys(pattern for rule in rules for pattern in rule))
    allowed: str | None = patterns[0]
    if len(patterns) > 1:
        places = [[patterns.index(pattern) for pattern in rule] for rule in rules]
        try:
            allowed = combined(
                patterns,
                lambda flags: any(all(flags[at] for at in rule) for rule in places),
                writing.expansion.spend(writing.place, "propertyNames"),
            )
        except Unread:
            raise writing.refusal("has rules of names that are too large to be one", "propertyNames") from None
    return replace(kept, rests=(*kept.rests, Rest(frozenset(), () if allowed is None else (allowed,), nothing)))


def _expressions(fact: String) -> tuple[str, ...]:
    """What a string of the fact matches, without its formats."""
    found = fact.patterns
    if fact.shortest or fact.longest is not None:
        found += (f"^(?s:.{{{fact.shortest},{'' if fact.longest is None else fact.longest}}})$",)
    if fact.values is not None:
        found += (exactly(sorted(fact.values)),)
    if fact.excluded:
        found += (anything_but(fact.excluded),)
    return found


def compiles(schema: Schema) -> str:
    """What llguidance says against `schema`. Empty: nothing."""
    options = {"whitespace_flexible": False}
    text = json.dumps({**schema, "x-guidance": options} if isinstance(schema, dict) else schema)
    return LLMatcher.validate_grammar(f'%llguidance {{"no_forcing": true}}\nstart: %json {text}')


@lru_cache(4096)
def matches(pattern: str, name: str) -> bool:
    """Whether the property name `name` matches `pattern`, by the engine that enforces it."""
    return not disjoint((pattern, exactly([name])))


def disjoint(patterns: tuple[str, ...]) -> bool:
    return not compiles({"type": "object", "patternProperties": {pattern: True for pattern in patterns}})
