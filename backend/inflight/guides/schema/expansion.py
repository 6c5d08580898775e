"""A schema, or its complement, as a union of facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from inflight.guides.refusal import GuideRefused
from inflight.guides.schema.arrays import read_array
from inflight.guides.schema.documents import Documents, Place, escaped
from inflight.guides.schema.facts import ANY, Array, Claim, Fact, Object, Rest, Union_, without
from inflight.guides.schema.in_place import read_in_place
from inflight.guides.schema.keyword_values import malformed, refusal
from inflight.guides.schema.keywords import ANNOTATIONS, KNOWN, misspelt
from inflight.guides.schema.objects import read_object
from inflight.guides.schema.omissions import Omissions
from inflight.guides.schema.scalars import read_scalar

MAX_ALTERNATIVES = 1_000
"""Facts in one union."""
MAX_WORK = 10_000
"""Merges of facts for one guide."""
MAX_STEPS = 100_000
"""Of the automata of one guide."""
OPENING = ("patternProperties", "additionalProperties", "unevaluatedProperties")
"""What is said of properties by them is not nothing, so that objects are not closed where they are left out."""


class Expansion:
    """Of the schemas of one guide."""

    def __init__(self, documents: Documents, omissions: Omissions) -> None:
        self.documents = documents
        self.omissions = omissions
        self.work = 0
        self.steps = 0
        self._kept: dict[Claim, Union_] = {}
        self._open: set[Claim] = set()
        self._values: dict[str, Place] = {}
        self.sees = any(
            isinstance(p.schema, dict) and ({"unevaluatedItems", "unevaluatedProperties"} & p.schema.keys())
            for p in documents.places.values()
        )
        self.nothing = Claim(Place(False, "", ""))
        open_object = Object(rests=(Rest(frozenset(), (), Claim(Place(True, "", ""))),))
        self._open_any = without("object", open_object)
        """Anything, and objects that have a word about other properties: any."""

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

    def spend(self, pointer: str, keyword: str) -> Callable[[int], None]:
        """Counts steps of automata. Raises GuideRefused once the guide has more than MAX_STEPS."""

        def count(steps: int) -> None:
            self.steps += steps
            if self.steps > MAX_STEPS:
                raise GuideRefused(
                    f"needs more than {MAX_STEPS} steps for its regular expressions",
                    pointer=pointer,
                    keyword=keyword,
                    is_final=True,
                )

        return count

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
            one = self._open_any if key in OPENING else ANY
            if (place.pointer, key) not in self.omissions.omitted:
                try:
                    if key.startswith("unevaluated"):
                        if not holds:
                            raise refusal("cannot be negated", place, key)
                        union = self._unevaluated(place, key, union)
                        continue
                    one = self._keyword(place, key, holds)
                except GuideRefused as refused:
                    self.omissions.drop(refused, [(place.pointer, key)] if refused.keyword else [])
            union = self.product(union, one, place, key) if holds else tuple(dict.fromkeys(union + one))
        return union

    def _keyword(self, place: Place, key: str, holds: bool) -> Union_:
        for read in (read_in_place, read_scalar, read_array, read_object):
            union = read(self, place, key, place.schema[key], holds)
            if union is not None:
                return union
        return ANY if holds else ()

    def at(self, place: Place, *steps: str | int) -> Claim:
        pointer = place.pointer + "".join(f"/{escaped(step)}" for step in steps)
        if pointer in self.documents.places:
            return Claim(self.documents.within(self.documents.places[pointer], place.scope))
        raise malformed("holds no schema", place, str(steps[0]))

    def every(self, claims: list[Claim], place: Place, key: str) -> Union_:
        union: Union_ = ANY
        for claim in claims:
            union = self.product(union, self.expand(claim), place, key)
        return union

    def _unevaluated(self, place: Place, key: str, union: Union_) -> Union_:
        claim = self.at(place, key)
        if self.omissions.blinds(self.documents, place):
            raise refusal("is about what a keyword has not looked at that is left out", place, key)
        out: list[Fact] = []
        for fact in union:
            if key == "unevaluatedItems" and isinstance(fact, Array):
                if fact.contains:
                    raise refusal("stands beside contains", place, key)
                if fact.seen is not None:
                    fact = replace(fact, items=(*fact.items, (fact.seen, None, claim)), seen=None)
            elif key == "unevaluatedProperties" and isinstance(fact, Object) and not fact.has_seen_all:
                rest = Rest(fact.seen, fact.seen_patterns, claim)
                fact = replace(fact, rests=(*fact.rests, rest), has_seen_all=True)
            out.append(fact)
        return tuple(dict.fromkeys(out))
