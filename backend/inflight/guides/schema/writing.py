"""Facts, written as schemas of the keywords that llguidance enforces exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, permutations
from typing import Any

from llguidance import LLMatcher

from inflight.guides.refusal import GuideRefused
from inflight.guides.schema.expansion import MAX_ALTERNATIVES, MAX_INTEGER, Expansion
from inflight.guides.schema.facts import Array, Boolean, Claim, Fact, Null, Number, Object, Rest, String, least
from inflight.guides.schema.patterns import anything_but, exactly

MAX_POSITION = 12
"""Before which item of an array without `maxItems` those that `contains` counts are generated. Arrays whose first such
item stands later are instances, too, but are not generated: no schema of fixed size stands for them."""
MAX_STATES = 2_000
"""Different schemas that are written for one guide."""
MAX_OPTIONAL = 400
"""Properties of an object that may be left out: the library reads each of them as one that may come next, and stops at
2,000 of its readings (PARSER_LIMITS)."""
MAX_EXCLUDED = 100
"""Characters of a text that must not be: its regular expression has a group in a group for each."""
MAX_PATTERNS = 8
"""Patterns of the properties of one object."""
MAX_MATCHES = 64
"""Names of properties that are held against patterns, in one guide."""
Schema = dict[str, Any] | bool


class Writing:
    def __init__(self, expansion: Expansion, closes_objects: bool) -> None:
        self.expansion = expansion
        self.closes_objects = closes_objects
        self.definitions: dict[str, Schema] = {}
        self._written: dict[frozenset[Claim], Schema] = {}
        self._open: dict[frozenset[Claim], str] = {}
        self._referred: set[str] = set()
        self._place = ""
        self._count = 0
        self._matches = 0

    def write(self, claims: frozenset[Claim]) -> Schema:
        claims = frozenset(c for c in claims if c.place.schema is not c.holds)
        if not claims:
            return True
        if claims in self._written:
            return self._written[claims]
        if claims in self._open:
            self._referred.add(self._open[claims])
            return {"$ref": f"#/$defs/{self._open[claims]}"}
        self._count += 1
        if self._count > MAX_STATES:
            raise GuideRefused(f"needs more than {MAX_STATES} schemas")
        name = self._open[claims] = f"s{self._count}"
        if len(self._open) > 60:
            raise GuideRefused("needs schemas deeper than 60")
        outer, self._place = self._place, min(claim.place.pointer for claim in claims)
        try:
            union = self.expansion.all_of(sorted(claims, key=lambda claim: (claim.place.pointer, not claim.holds)))
            schema = self.union(union)
        finally:
            del self._open[claims]
            self._place = outer
        if isinstance(schema, dict) and (name in self._referred or "object" in str(schema.get("type"))):
            self.definitions[name] = schema
            schema = {"$ref": f"#/$defs/{name}"}
        self._written[claims] = schema
        return schema

    def union(self, facts: tuple[Fact, ...]) -> Schema:
        written = [schema for fact in facts for schema in self.fact(fact) if schema is not False]
        written = list({json.dumps(schema): schema for schema in written}.values())
        if len(written) > MAX_ALTERNATIVES:
            raise self.refusal(f"needs more than {MAX_ALTERNATIVES} alternatives", "")
        return False if not written else written[0] if len(written) == 1 else {"anyOf": written}

    def refusal(self, what: str, keyword: str) -> GuideRefused:
        return GuideRefused(what, pointer=self._place, keyword=keyword)

    def fact(self, fact: Fact) -> Iterator[Schema]:
        if isinstance(fact, Null):
            yield {"type": "null"}
        elif isinstance(fact, Boolean):
            yield {"type": "boolean"} if len(fact.values) == 2 else {"enum": sorted(fact.values)}
        elif isinstance(fact, Number):
            yield from self.number(fact)
        elif isinstance(fact, String):
            yield self.string(fact)
        elif isinstance(fact, Array):
            for array in self.counted(fact):
                yield from self.array(array)
        else:
            yield from self.object(fact)

    def plain(self, number: Fraction, keyword: str) -> int | float:
        if number.denominator == 1 and abs(number) <= MAX_INTEGER:
            return int(number)
        value = float(number) if abs(number) < MAX_INTEGER else 0.0
        if Fraction(str(value)) != number or abs(value) < 1e-9:
            raise self.refusal("has a number beyond what is exact", keyword)
        return value

    def number(self, fact: Number) -> Iterator[Schema]:
        if fact.values is not None:
            yield {"enum": [self.plain(value, "enum") for value in sorted(fact.values)]}
            return
        if fact.is_fractional:
            self.expansion.drop(self.refusal("excludes integers among numbers", "not"))
        for value in sorted(fact.excluded):
            if replace(fact, excluded=frozenset()).takes(value):
                below = replace(fact, excluded=frozenset(v for v in fact.excluded if v < value))
                below = replace(below, high=value, is_high_open=True)
                above = replace(fact, excluded=frozenset(v for v in fact.excluded if v > value))
                above = replace(above, low=value, is_low_open=True)
                for part in (below, above):
                    if (merged := part.merged(Number())) is not None:
                        yield from self.number(merged)
                return
        schema: dict[str, Any] = {"type": "integer" if fact.is_integer else "number"}
        low, high, low_open, high_open = fact.low, fact.high, fact.is_low_open, fact.is_high_open
        if fact.is_integer:
            # Whole bounds, both inclusive: the library's own rounding is not asked.
            low = None if low is None else Fraction(low.__floor__() + 1 if low_open else low.__ceil__())
            high = None if high is None else Fraction(high.__ceil__() - 1 if high_open else high.__floor__())
            low_open = high_open = False
            if low is not None and high is not None and low > high:
                return
        if low is not None:
            schema["exclusiveMinimum" if low_open else "minimum"] = self.plain(low, "minimum")
        if high is not None:
            schema["exclusiveMaximum" if high_open else "maximum"] = self.plain(high, "maximum")
        if fact.step is not None:
            schema["multipleOf"] = self.plain(fact.step, "multipleOf")
        yield schema

    def string(self, fact: String) -> Schema:
        patterns = fact.patterns
        if fact.excluded:
            if max(len(text) for text in fact.excluded) > MAX_EXCLUDED:
                raise self.refusal(f"excludes text longer than {MAX_EXCLUDED} characters", "not")
            patterns += (anything_but(fact.excluded),)
        schema: dict[str, Any] = {"type": "string"}
        if fact.values is not None:
            schema = {"enum": sorted(fact.values)}
        if fact.shortest:
            schema["minLength"] = fact.shortest
        if fact.longest is not None:
            schema["maxLength"] = fact.longest
        more = [{"type": "string", "pattern": pattern} for pattern in patterns]
        more += [{"type": "string", "format": name} for name in fact.formats]
        return {"allOf": [schema, *more]} if more else schema

    def counted(self, fact: Array) -> Iterator[Array]:
        """`fact` without `contains`, as arrays with their items at fixed places."""
        if not fact.contains:
            yield fact
            return
        one, rest = fact.contains[0], replace(fact, contains=fact.contains[1:])
        limit = min(MAX_POSITION, MAX_POSITION if fact.longest is None else fact.longest)
        if one.least > MAX_POSITION:
            raise self.refusal(f"counts more than {MAX_POSITION} items", "contains")
        denied = replace(one.claim, holds=False)
        counts = range(one.least, (one.least if one.most is None else min(one.most, limit)) + 1)
        found = 0
        for count in counts:
            for places in combinations(range(limit), count):
                found += 1
                if found > MAX_ALTERNATIVES:
                    raise self.refusal(f"needs more than {MAX_ALTERNATIVES} alternatives", "contains")
                self.expansion.charge(10, self._place, "contains")
                items: list[tuple[int, int | None, Claim]] = [(i, i + 1, one.claim) for i in places]
                if one.most is not None:
                    free = [i for i in range(limit) if i not in places]
                    items += [(i, i + 1, denied) for i in free] + [(limit, None, denied)]
                made = rest.merged(Array(places[-1] + 1 if places else 0, items=tuple(items)))
                if made is not None:
                    yield from self.counted(made)

    def array(self, fact: Array) -> Iterator[Schema]:
        if fact.is_unique and (fact.longest is None or fact.longest > 1):
            unique = self.unique(fact)
            if unique is not None:
                yield {"enum": unique} if unique else False
                return
        stops = [stop or start for start, stop, _ in fact.items]
        size = max(stops, default=0)
        if size > MAX_ALTERNATIVES or fact.shortest > 4096 or (fact.longest or 0) > 4096:
            raise self.refusal("counts more than 4096 items", "maxItems" if fact.longest else "minItems")
        prefix: list[Schema] = []
        longest = fact.longest
        for index in range(size if longest is None else min(size, longest)):
            schema = self.write(fact.claims(index))
            if schema is False:
                longest = index
                break
            prefix.append(schema)
        tail = self.write(fact.claims(size)) if longest is None or longest > size else False
        if tail is False:
            longest = least(longest, len(prefix))
        if longest is not None and longest < fact.shortest:
            yield False
            return
        schema = {"type": "array"}
        if prefix:
            schema["prefixItems"] = prefix
        if tail is not True:
            schema["items"] = tail
        if fact.shortest:
            schema["minItems"] = fact.shortest
        if longest is not None and tail is not False:
            schema["maxItems"] = longest
        yield schema

    def values(self, claims: frozenset[Claim]) -> list[Any] | None:
        """All values that something with `claims` can have. None: not a finite number that is at hand."""
        out: list[Any] = []
        for fact in self.expansion.all_of(claims):
            if isinstance(fact, Null):
                out.append(None)
            elif isinstance(fact, Boolean):
                out += sorted(fact.values)
            elif isinstance(fact, Number) and fact.values is not None:
                out += [self.plain(value, "enum") for value in sorted(fact.values)]
            elif isinstance(fact, Number) and fact.is_integer and fact.low is not None and fact.high is not None:
                if fact.high - fact.low > 8:
                    return None
                span = range(fact.low.__floor__(), fact.high.__floor__() + 1)
                out += [value for value in span if fact.takes(Fraction(value))]
            elif isinstance(fact, String) and fact.values is not None and not fact.patterns + fact.formats:
                out += sorted(fact.values)
            else:
                return None
        return list({json.dumps(value): value for value in out}.values())

    def unique(self, fact: Array) -> list[list[Any]] | None:
        size = max((stop or start for start, stop, _ in fact.items), default=0)
        sets = [self.values(fact.claims(index)) for index in range(size + 1)]
        if any(values is None for values in sets):
            self.expansion.drop(self.refusal("asks for unique items of values that are not listed", "uniqueItems"))
            return None
        known = [[json.dumps(value) for value in values or []] for values in sets]
        every = list(dict.fromkeys(value for values in known for value in values))
        found: list[list[Any]] = []
        for length in range(
            fact.shortest, len(every) + 1 if fact.longest is None else min(fact.longest, len(every)) + 1
        ):
            for tried, row in enumerate(permutations(every, length)):
                if all(value in known[min(i, size)] for i, value in enumerate(row)):
                    found.append([json.loads(value) for value in row])
                if len(found) > MAX_ALTERNATIVES or tried > 20 * MAX_ALTERNATIVES:
                    raise self.refusal(f"needs more than {MAX_ALTERNATIVES} alternatives", "uniqueItems")
        return found

    def object(self, fact: Object) -> Iterator[Schema]:
        if fact.names:
            fact = self.named(fact)
        if self.closes_objects and fact.named and not fact.rests and not fact.patterned:
            rest = Rest(frozenset(name for name, _ in fact.named), (), self.expansion.nothing)
            fact = replace(fact, rests=(rest,))
        names = dict.fromkeys(name for name, _ in fact.named)
        names |= dict.fromkeys(fact.required)
        for rest in fact.rests:
            names |= dict.fromkeys(sorted(rest.names))
        patterns = tuple(dict.fromkeys([p for p, _ in fact.patterned] + [p for r in fact.rests for p in r.patterns]))
        self._matches += len(names) * len(patterns)
        if len(patterns) > MAX_PATTERNS or self._matches > MAX_MATCHES:
            raise self.refusal("has too many patterns of properties, or too many names beside", "patternProperties")
        properties: dict[str, Schema] = {}
        for name in names:
            claims = {claim for named, claim in fact.named if named == name}
            claims |= {claim for pattern, claim in fact.patterned if matches(pattern, name)}
            for rest in fact.rests:
                if name not in rest.names and not any(matches(pattern, name) for pattern in rest.patterns):
                    claims.add(rest.claim)
            properties[name] = self.write(frozenset(claims))
            if properties[name] is False and name in fact.required:
                yield False
                return
        schema: dict[str, Any] = {"type": "object"}
        if len(patterns) > 1 and not disjoint(patterns):
            raise self.refusal("has patterns of properties that one name can match", "patternProperties")
        if patterns:
            schema["patternProperties"] = {
                pattern: self.write(
                    frozenset(claim for own, claim in fact.patterned if own == pattern)
                    | frozenset(rest.claim for rest in fact.rests if pattern not in rest.patterns)
                )
                for pattern in patterns
            }
        others = self.write(frozenset(rest.claim for rest in fact.rests))
        if others is False and patterns:
            # A pattern without values says nothing more, but the library holds listed properties against it, too.
            left = {pattern: one for pattern, one in schema["patternProperties"].items() if one is not False}
            patterns = tuple(left)
            del schema["patternProperties"]
            schema |= {"patternProperties": left} if left else {}
        if others is not True:
            schema["additionalProperties"] = others
        yield from self.sized(schema, properties, fact, others is False and not patterns)

    def sized(
        self, schema: dict[str, Any], properties: dict[str, Schema], fact: Object, is_closed: bool
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
            raise self.refusal(f"has more than {MAX_OPTIONAL} properties that may be left out", "properties")
        if not fewest and most is None:
            yield self.listed(schema, properties, required)
            return
        if len(optional) > 9:
            raise self.refusal(
                "counts properties of which more than 9 are optional", "minProperties" if fewest else "maxProperties"
            )
        for count in range(len(optional) + 1):
            for chosen in combinations(optional, count):
                present = [name for name in allowed if name in required or name in chosen]
                if (most is not None and len(present) > most) or (is_closed and len(present) < fewest):
                    continue
                absent = [name for name in properties if name not in present]
                if absent and not is_closed:
                    raise self.refusal(
                        "counts properties beside optional ones", "minProperties" if fewest else "maxProperties"
                    )
                made = self.listed(schema, {name: properties[name] for name in present}, present)
                if not is_closed and fewest:
                    made["minProperties"] = fewest
                if not is_closed and most is not None:
                    made["maxProperties"] = most
                yield made

    def listed(self, schema: dict[str, Any], properties: dict[str, Schema], required: list[str]) -> dict[str, Any]:
        made = {"type": "object"}
        if properties:
            made["properties"] = properties  # type: ignore[assignment]
        return {**made, **schema, **({"required": required} if required else {})}

    def named(self, fact: Object) -> Object:
        """`fact` without `propertyNames`: their strings are listed, or are a pattern."""
        nothing = self.expansion.nothing
        kept = replace(fact, names=())
        facts = [f for f in self.expansion.all_of(fact.names) if isinstance(f, String)]
        if not facts:
            return replace(kept, rests=(*kept.rests, Rest(frozenset(), (), nothing)))
        if len(facts) == 1 and facts[0] == String():
            return kept
        listed = [name for name, _ in fact.named] + list(fact.required)
        for name in listed:
            claim = self.expansion.value(name, self._place)
            if not self.write(frozenset((*fact.names, claim))):
                kept = replace(kept, named=(*kept.named, (name, nothing)))
        if all(f.values is not None and not f.patterns + f.formats for f in facts):
            names = frozenset(name for f in facts for name in f.values or ())
            anything = tuple((name, Claim(replace(nothing.place, schema=True))) for name in sorted(names))
            return replace(kept, named=(*kept.named, *anything), rests=(*kept.rests, Rest(names, (), nothing)))
        one = facts[0]
        if len(facts) > 1 or len(one.patterns) + len(one.formats) > 1 or one.formats or one.values:
            raise self.refusal("has rules of names that are not one pattern", "propertyNames")
        pattern = one.patterns[0] if one.patterns else None
        if pattern and (one.shortest or one.longest is not None or one.excluded):
            raise self.refusal("has rules of names that are not one pattern", "propertyNames")
        if one.excluded:
            forbidden = tuple((name, nothing) for name in sorted(one.excluded))
            kept = replace(kept, named=(*kept.named, *forbidden))
        if pattern is None and not one.shortest and one.longest is None:
            return kept
        pattern = pattern or f"^(?s:.{{{one.shortest},{'' if one.longest is None else one.longest}}})$"
        return replace(kept, rests=(*kept.rests, Rest(frozenset(), (pattern,), nothing)))


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
