"""A schema, or its complement, as a union of facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from inflight.guides.refusal import GuideRefused
from inflight.guides.schema import formats
from inflight.guides.schema.documents import Documents, Place, escaped
from inflight.guides.schema.facts import (
    ANY,
    Array,
    Boolean,
    Claim,
    Contains,
    Fact,
    Null,
    Number,
    Object,
    Rest,
    String,
)
from inflight.guides.schema.keywords import (
    ANNOTATIONS,
    KNOWN,
    TYPES,
    misspelt,
)
from inflight.guides.schema.patterns import translate

MAX_ALTERNATIVES = 1_000
"""Facts in one union."""
MAX_WORK = 10_000
"""Merges of facts for one guide."""
MAX_INTEGER = 2**53
"""Numbers beyond are not exact in JSON (RFC 8259, 6)."""

Union_ = tuple[Fact, ...]


def others(*kept: Fact) -> Union_:
    """Everything of other types than `kept`, and `kept`."""
    types = {fact.type for fact in kept}
    return (*(fact for fact in ANY if fact.type not in types), *kept)


def without(type_name: str, *kept: Fact) -> Union_:
    return (*(fact for fact in ANY if fact.type != type_name), *kept)


def unseen(union: Union_) -> Union_:
    """What `not` lets through of a union: no word of which items and properties keywords have looked at."""
    return tuple(
        replace(fact, seen=0)
        if isinstance(fact, Array)
        else replace(fact, seen=frozenset(), seen_patterns=(), has_seen_all=False)
        if isinstance(fact, Object)
        else fact
        for fact in union
    )


class Expansion:
    """Of the schemas of one guide. `drop` is told of what cannot be expressed; it raises where that must be refused."""

    def __init__(self, documents: Documents, drop: Callable[[GuideRefused], None]) -> None:
        self.documents = documents
        self.drop = drop
        self.work = 0
        self._kept: dict[Claim, Union_] = {}
        self._open: set[Claim] = set()
        self._values: dict[str, Place] = {}
        self.sees = any(
            isinstance(p.schema, dict) and ({"unevaluatedItems", "unevaluatedProperties"} & p.schema.keys())
            for p in documents.places.values()
        )
        self.nothing = Claim(Place(False, "", ""))

    def value(self, value: Any, pointer: str) -> Claim:
        """That something equals `value`."""
        key = repr(value)
        if key not in self._values:
            self._values[key] = Place({"const": value}, pointer, "")
        return Claim(self._values[key])

    def all_of(self, claims: Iterable[Claim]) -> Union_:
        union: Union_ = ANY
        for claim in claims:
            union = self.product(union, self.expand(claim), claim.place, "")
        return union

    def product(self, left: Union_, right: Union_, place: Place, keyword: str) -> Union_:
        out: dict[Fact, None] = {}
        for a in left:
            for b in right:
                if a.type != b.type:
                    continue
                self.charge(1, place.pointer, keyword)
                both = a.merged(b)  # type: ignore[arg-type]
                if both is not None and not self.is_empty(both):
                    out[both] = None
        if len(out) > MAX_ALTERNATIVES:
            raise GuideRefused(
                f"needs more than {MAX_ALTERNATIVES} alternatives",
                pointer=place.pointer,
                keyword=keyword,
                is_final=True,
            )
        return tuple(out)

    def charge(self, work: int, pointer: str, keyword: str) -> None:
        """Count `work` merges or what takes as long. Raises GuideRefused once there are more than MAX_WORK."""
        self.work += work
        if self.work > MAX_WORK:
            raise GuideRefused(f"needs more than {MAX_WORK} merges", pointer=pointer, keyword=keyword, is_final=True)

    def is_empty(self, fact: Fact) -> bool:
        """Whether a required property can have no value: what tells apart objects by a property's constant."""
        if not isinstance(fact, Object):
            return False
        for name in fact.required:
            claims = [claim for named, claim in fact.named if named == name]
            if any(c.place.schema is False and c.holds for c in claims):
                return True
            literal = [
                c
                for c in claims
                if isinstance(c.place.schema, dict) and ({"const", "enum", "type"} & c.place.schema.keys())
            ]
            if len(literal) > 1 and not self._open.intersection(literal) and not self.all_of(literal):
                return True
        return False

    def expand(self, claim: Claim) -> Union_:
        if claim in self._kept:
            return self._kept[claim]
        place = claim.place
        if claim in self._open:
            raise GuideRefused("refers to itself without a property or an item between", pointer=place.pointer)
        if len(self._open) > 100:
            raise GuideRefused("has references deeper than 100", pointer=place.pointer)
        self._open.add(claim)
        try:
            if isinstance(place.schema, bool):
                union: Union_ = ANY if place.schema == claim.holds else ()
            else:
                union = self._keywords(place, claim.holds)
        finally:
            self._open.discard(claim)
        self._kept[claim] = union
        return union

    def _keywords(self, place: Place, holds: bool) -> Union_:
        schema = place.schema
        keys = ["$ref"] if place.is_old and "$ref" in schema else list(schema)
        for key in keys:
            if key not in KNOWN and (near := misspelt(key)):
                raise GuideRefused(
                    f"has an unknown keyword, near {near!r}", pointer=place.pointer, keyword=key, is_final=True
                )
        # Properties first: their order is that of what is generated. Unevaluated ones after all others.
        keys = [k for k in keys if k in KNOWN and k not in ANNOTATIONS]
        keys.sort(key=lambda k: (k.startswith("unevaluated"), k in ("required",)))
        union: Union_ = ANY if holds else ()
        for key in keys:
            try:
                if key.startswith("unevaluated"):
                    if not holds:
                        raise self.refusal("cannot be negated", place, key)
                    union = self._unevaluated(place, key, union)
                    continue
                one = self._keyword(place, key, holds)
            except GuideRefused as refused:
                self.drop(refused)
                one = ANY
            union = self.product(union, one, place, key) if holds else tuple(dict.fromkeys(union + one))
        return union

    def refusal(self, what: str, place: Place, key: str) -> GuideRefused:
        return GuideRefused(f"has a keyword that {what}", pointer=place.pointer, keyword=key)

    def malformed(self, what: str, place: Place, key: str) -> GuideRefused:
        return GuideRefused(f"has a keyword that {what}", pointer=place.pointer, keyword=key, is_final=True)

    def _keyword(self, place: Place, key: str, holds: bool) -> Union_:
        for handler in (self._in_place, self._scalar, self._array, self._object):
            union = handler(place, key, place.schema[key], holds)
            if union is not None:
                return union
        return ANY if holds else ()

    def at(self, place: Place, *steps: str | int) -> Claim:
        pointer = place.pointer + "".join(f"/{escaped(step)}" for step in steps)
        if pointer in self.documents.places:
            return Claim(self.documents.places[pointer])
        raise self.refusal("holds no schema", place, str(steps[0]))

    def _any(self, unions: Iterable[Union_]) -> Union_:
        return tuple(dict.fromkeys(fact for union in unions for fact in union))

    def _every(self, claims: list[Claim], place: Place, key: str) -> Union_:
        union: Union_ = ANY
        for claim in claims:
            union = self.product(union, self.expand(claim), place, key)
        return union

    def _in_place(self, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
        if key in ("$ref", "$dynamicRef", "$recursiveRef"):
            return self.expand(Claim(self.documents.follow(place, key), holds))
        if key == "type":
            return self._type(place, value, holds)
        if key in ("const", "enum"):
            if key == "enum" and not isinstance(value, list):
                raise self.malformed("must be a list", place, key)
            return self._constants(place, key, value if key == "enum" else [value], holds)
        if key == "not":
            return unseen(self.expand(replace(self.at(place, key), holds=not holds)))
        if key == "if":
            return self._condition(place, holds)
        if key in ("allOf", "anyOf", "oneOf"):
            if not isinstance(value, list) or not value:
                raise self.malformed("must be a list of schemas", place, key)
            claims = [self.at(place, key, i) for i in range(len(value))]
            denied = [replace(claim, holds=False) for claim in claims]
            if key == "oneOf":
                return self._one_of(claims, denied, place, holds)
            if (key == "allOf") == holds:
                return self._every(claims if holds else denied, place, key)
            union = self._any(self.expand(claim) for claim in (claims if holds else denied))
            if holds and self.sees and 1 < len(claims) <= 4:
                groups = [g for n in range(2, len(claims) + 1) for g in combinations(claims, n)]
                union = self._any([union, *(self._every(list(group), place, key) for group in groups)])
            return union
        return None

    def _condition(self, place: Place, holds: bool) -> Union_:
        condition = self.at(place, "if")
        ways = []
        for keyword, is_met in (("then", True), ("else", False)):
            claims = [replace(condition, holds=is_met)]
            if keyword in place.schema:
                claims.append(replace(self.at(place, keyword), holds=holds))
            elif not holds:
                continue
            if claims[-1].place.schema is not (not claims[-1].holds):
                ways.append(self._every(claims, place, "if"))
        return self._any(ways)

    def _one_of(self, claims: list[Claim], denied: list[Claim], place: Place, holds: bool) -> Union_:
        if not holds:
            raise self.refusal("cannot be negated", place, "oneOf")
        unions = [self.expand(claim) for claim in claims]
        ways = []
        for i, union in enumerate(unions):
            for j, other in enumerate(unions):
                if i != j:
                    alone = tuple(fact for fact in union if not self.product((fact,), other, place, "oneOf"))
                    both = tuple(fact for fact in union if fact not in alone)
                    if both:
                        union = (*alone, *self.product(both, self.expand(denied[j]), place, "oneOf"))
            ways.append(union)
        return self._any(ways)

    def _type(self, place: Place, value: Any, holds: bool) -> Union_:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(n, str) and n in (*TYPES, "integer") for n in names):
            raise self.malformed("names no type of JSON", place, "type")
        if holds:
            kept = [fact for fact in ANY if fact.type in names]
            return (*kept, *([Number(is_integer=True)] if "integer" in names and "number" not in names else []))
        left = [fact for fact in ANY if fact.type not in names]
        if "integer" in names and "number" not in names:
            left = [Number(is_fractional=True) if fact.type == "number" else fact for fact in left]
        return tuple(left)

    def _constants(self, place: Place, key: str, values: list[Any], holds: bool) -> Union_:
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
                    items = tuple((i, i + 1, self.value(v, at)) for i, v in enumerate(value))
                    facts.append(Array(len(value), len(value), items))
                else:
                    named = tuple((name, self.value(v, at)) for name, v in value.items())
                    rest = Rest(frozenset(value), (), self.nothing)
                    facts.append(Object(named=named, rests=(rest,), required=tuple(value)))
            return tuple(facts)
        facts += [] if nulls else [Null()]
        facts += [Boolean(frozenset({False, True}) - booleans)] if len(booleans) < 2 else []
        facts += [Number(excluded=numbers), String(excluded=strings)]
        union: Union_ = (*facts, Array(), Object())
        for value in nested:
            union = self.product(union, self._unlike(place, key, value), place, key)
        return union

    def _unlike(self, place: Place, key: str, value: Any) -> Union_:
        if isinstance(value, list):
            facts: list[Fact] = [Array(shortest=len(value) + 1)]
            facts += [Array(longest=len(value) - 1)] if value else []
            for i, v in enumerate(value):
                claim = replace(self.value(v, place.pointer), holds=False)
                facts.append(Array(i + 1, items=((i, i + 1, claim),)))
            return without("array", *facts)
        facts = [Object(fewest=len(value) + 1)]
        facts += [Object(named=((name, self.nothing),)) for name in value]
        facts += [
            Object(named=((name, replace(self.value(v, place.pointer), holds=False)),), required=(name,))
            for name, v in value.items()
        ]
        return without("object", *facts)

    def number(self, place: Place, key: str, value: Any) -> Fraction:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (float("inf"), float("-inf")):
            raise self.malformed("must be a number", place, key)
        return Fraction(str(value))

    def whole(self, place: Place, key: str, value: Any) -> int:
        number = self.number(place, key, value)
        if number.denominator != 1 or not 0 <= number <= 2**31:
            raise self.malformed(f"must be an integer from 0 to {2**31}", place, key)
        return int(number)

    def _scalar(self, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
        fact: Fact
        if key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(value, bool) and key.startswith("ex"):
                return ANY if holds else ()
            beside = place.schema.get("exclusive" + key[:1].upper() + key[1:])
            bound, is_open = self.number(place, key, value), key.startswith("ex") or beside is True
            is_low = key.lower().endswith("minimum") == holds
            is_open = is_open == holds
            fact = Number(low=bound, is_low_open=is_open) if is_low else Number(high=bound, is_high_open=is_open)
            return without("number", fact) if holds else (fact,)
        if key == "multipleOf":
            step = self.number(place, key, value)
            if step <= 0:
                raise self.malformed("must be above zero", place, key)
            if not holds:
                if step == 1:
                    return (Number(is_fractional=True),)
                raise self.refusal("cannot be negated", place, key)
            return without("number", Number(step=step))
        if key in ("minLength", "maxLength"):
            length = self.whole(place, key, value)
            if key == "minLength":
                if not holds:
                    return (String(longest=length - 1),) if length else ()
                return without("string", String(shortest=length))
            return without("string", String(longest=length)) if holds else (String(shortest=length + 1),)
        if key == "pattern":
            pattern = translate(value, place.pointer)
            if not holds:
                raise self.refusal("cannot be negated", place, key)
            return without("string", String(patterns=(pattern,)))
        if key == "format":
            if not isinstance(value, str):
                raise self.malformed("must be text", place, key)
            if value in formats.REFUSED:
                raise self.refusal(f"names the format {value!r}, which is not enforced", place, key)
            if value not in formats.PATTERNS and value not in formats.OF_LIBRARY:
                return ANY if holds else ()
            if not holds:
                raise self.refusal("cannot be negated", place, key)
            if value in formats.PATTERNS:
                return without("string", String(patterns=(formats.PATTERNS[value],)))
            return without("string", String(formats=(value,)))
        return None

    def _array(self, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
        schema = place.schema
        fact: Array
        if key in ("minItems", "maxItems"):
            length = self.whole(place, key, value)
            if key == "minItems":
                if not holds:
                    return (Array(longest=length - 1),) if length else ()
                return without("array", Array(shortest=length))
            return without("array", Array(longest=length)) if holds else (Array(shortest=length + 1),)
        if key == "uniqueItems":
            if not isinstance(value, bool):
                raise self.malformed("must be true or false", place, key)
            if not value:
                return ANY if holds else ()
            if not holds:
                raise self.refusal("cannot be negated", place, key)
            return without("array", Array(is_unique=True))
        if key == "contains":
            return self._contains(place, holds)
        claims: list[tuple[int, int | None, Claim]]
        if key == "prefixItems" or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise self.malformed("must be a list of schemas", place, key)
            claims = [(i, i + 1, self.at(place, key, i)) for i in range(len(value))]
            fact = Array(items=tuple(claims), seen=len(value))
        elif key == "items":
            claims = [(len(schema.get("prefixItems", [])), None, self.at(place, key))]
            fact = Array(items=tuple(claims), seen=None)
        elif key == "additionalItems":
            if not isinstance(schema.get("items"), list):
                return ANY if holds else ()
            claims = [(len(schema["items"]), None, self.at(place, key))]
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
                raise self.refusal("cannot be negated", place, key)
        return tuple(denied)

    def _contains(self, place: Place, holds: bool) -> Union_:
        claim = self.at(place, "contains")
        least = self.whole(place, "minContains", place.schema.get("minContains", 1))
        most = place.schema.get("maxContains")
        most = None if most is None else self.whole(place, "maxContains", most)
        if holds:
            if least == 0 and most is None:
                return ANY
            return without("array", Array(contains=(Contains(claim, least, most),)))
        facts: list[Fact] = [Array(contains=(Contains(claim, 0, least - 1),))] if least else []
        facts += [Array(contains=(Contains(claim, most + 1, None),))] if most is not None else []
        return tuple(facts)

    def _object(self, place: Place, key: str, value: Any, holds: bool) -> Union_ | None:
        schema = place.schema
        if key in ("minProperties", "maxProperties"):
            number = self.whole(place, key, value)
            if key == "minProperties":
                if not holds:
                    return (Object(most=number - 1),) if number else ()
                return without("object", Object(fewest=number))
            return without("object", Object(most=number)) if holds else (Object(fewest=number + 1),)
        if key == "required":
            if isinstance(value, bool) and place.is_old:
                return ANY if holds else ()
            names = self.names(place, key, value)
            if holds:
                return without("object", Object(required=names))
            return tuple(Object(named=((name, self.nothing),)) for name in names)
        maps = ("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies")
        if key in maps and not isinstance(value, dict):
            raise self.malformed("must be an object", place, key)
        if key == "properties":
            named = tuple((name, self.at(place, key, name)) for name in value)
            if holds:
                return without("object", Object(named=named, seen=frozenset(value)))
            return tuple(Object(named=((n, replace(c, holds=False)),), required=(n,)) for n, c in named)
        if key in ("dependentRequired", "dependentSchemas", "dependencies"):
            return self._dependencies(place, key, value, holds)
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
            raise self.refusal("cannot be negated", place, key)
        if key == "patternProperties":
            # A name may be written in escapes, of which the library reads two for a character beyond the first plane.
            if any(max(map(ord, pattern), default=0) > 0xFFFF for pattern in value):
                raise self.refusal("names characters beyond the basic plane", place, key)
            found = tuple(
                (translate(pattern, f"{place.pointer}/{key}"), self.at(place, key, pattern)) for pattern in value
            )
            return without("object", Object(patterned=found, seen_patterns=tuple(pattern for pattern, _ in found)))
        if key == "additionalProperties":
            patterns = tuple(translate(p, place.pointer) for p in schema.get("patternProperties", {}))
            rest = Rest(frozenset(schema.get("properties", {})), patterns, self.at(place, key))
            return without("object", Object(rests=(rest,), has_seen_all=True))
        return without("object", Object(names=(self.at(place, key),)))

    def names(self, place: Place, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.malformed("must be a list of names", place, key)
        return tuple(dict.fromkeys(value))

    def _dependencies(self, place: Place, key: str, value: dict[str, Any], holds: bool) -> Union_:
        union: Union_ = ANY if holds else ()
        for name, then in value.items():
            has: Union_ = (Object(required=(name,)),)
            met: Union_
            if isinstance(then, list) or key == "dependentRequired":
                names = self.names(place, key, then)
                met = (Object(required=names),) if holds else tuple(Object(named=((n, self.nothing),)) for n in names)
            else:
                met = self.expand(replace(self.at(place, key, name), holds=holds))
            met = self.product(has, met, place, key)
            if holds:
                lacks = without("object", Object(named=((name, self.nothing),)))
                union = self.product(union, (*lacks, *met), place, key)
            else:
                union += met
        return union

    def _unevaluated(self, place: Place, key: str, union: Union_) -> Union_:
        claim = self.at(place, key)
        out: list[Fact] = []
        for fact in union:
            if key == "unevaluatedItems" and isinstance(fact, Array):
                if fact.contains:
                    raise self.refusal("stands beside contains", place, key)
                if fact.seen is not None:
                    fact = replace(fact, items=(*fact.items, (fact.seen, None, claim)), seen=None)
            elif key == "unevaluatedProperties" and isinstance(fact, Object) and not fact.has_seen_all:
                rest = Rest(fact.seen, fact.seen_patterns, claim)
                fact = replace(fact, rests=(*fact.rests, rest), has_seen_all=True)
            out.append(fact)
        return tuple(dict.fromkeys(out))
