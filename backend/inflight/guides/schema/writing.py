"""Facts, written as schemas of the keywords that llguidance enforces exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inflight.guides.refusal import GuideRefused
from inflight.guides.schema.expansion import MAX_ALTERNATIVES, Expansion
from inflight.guides.schema.facts import Array, Boolean, Claim, Fact, Null, Number, String
from inflight.guides.schema.omissions import at_fault
from inflight.guides.schema.patterns import NUMBERED, NUMBERED_CODE, anything_but
from inflight.guides.schema.writing_arrays import counted, write_array
from inflight.guides.schema.writing_numbers import write_number
from inflight.guides.schema.writing_objects import write_object

MAX_STATES = 2_000
"""Different schemas that are written for one guide."""
MAX_BYTES = 1 << 17
"""Of the schema that is made."""
MAX_INLINED = 200
"""Bytes of a schema that is written where it is used."""
MAX_EXCLUDED = 100
"""Characters of a text that must not be: its regular expression has a group in a group for each."""
Schema = dict[str, Any] | bool


class Writing:
    def __init__(self, expansion: Expansion, closes_objects: bool) -> None:
        self.expansion = expansion
        self.closes_objects = closes_objects
        self.definitions: dict[str, Schema] = {}
        self._written: dict[frozenset[Claim], Schema] = {}
        self._open: dict[frozenset[Claim], str] = {}
        self._referred: set[str] = set()
        self._places = [expansion.documents.root]
        self._count = 0
        self._num_bytes = 0
        self.num_matched = 0
        self.tried_numbers: set[str] = set()
        self.has_known_among_others = False
        """Whether an object has names with schemas of their own, and others."""
        self.numbered: GuideRefused | None = None
        """What is said if a text cannot be written for its characters that JSON writes by their numbers alone."""

    @property
    def place(self) -> str:
        """Pointer of the first schema of what is being written."""
        return self._places[0].pointer

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
        ordered = sorted(claims, key=lambda claim: (claim.place.pointer, claim.place.scope, not claim.holds))
        outer, self._places = self._places, [claim.place for claim in ordered]
        try:
            union = self.expansion.all_of(ordered)
            schema = self.union(union)
        except GuideRefused as refused:
            self.expansion.omissions.postpone(refused)
            schema = True
        finally:
            del self._open[claims]
            self._places = outer
        if isinstance(schema, dict):
            size = len(json.dumps(schema))
            # What is large stands in one place: inlined, schemas within schemas would multiply.
            if name in self._referred or "object" in str(schema.get("type")) or size > MAX_INLINED:
                self._num_bytes += size
                if self._num_bytes > MAX_BYTES:
                    raise GuideRefused(f"needs more than {MAX_BYTES} bytes", is_final=True)
                self.definitions[name] = schema
                schema = {"$ref": f"#/$defs/{name}"}
        self._written[claims] = schema
        return schema

    def union(self, facts: tuple[Fact, ...]) -> Schema:
        written = [schema for fact in facts for schema in self.fact(fact) if schema is not False]
        written = list({json.dumps(schema): schema for schema in written}.values())
        if len(written) > MAX_ALTERNATIVES:
            raise GuideRefused(f"needs more than {MAX_ALTERNATIVES} alternatives", pointer=self.place)
        return False if not written else written[0] if len(written) == 1 else {"anyOf": written}

    def refusal(self, what: str, *keywords: str) -> GuideRefused:
        """Of what is being written, for the first of the keywords that one of its schemas has; the first one of all is
        of the kind that it is about."""
        expansion = self.expansion
        spots = at_fault(expansion.documents, self._places, keywords, expansion.omissions.omitted)
        pointer, keyword = next(iter(spots), (self.place, keywords[0]))
        return GuideRefused(what, pointer=pointer, keyword=keyword, spots=spots)

    def fact(self, fact: Fact) -> Iterator[Schema]:
        if isinstance(fact, Null):
            yield {"type": "null"}
        elif isinstance(fact, Boolean):
            yield {"type": "boolean"} if len(fact.values) == 2 else {"enum": sorted(fact.values)}
        elif isinstance(fact, Number):
            yield from write_number(self, fact)
        elif isinstance(fact, String):
            yield self.string(fact)
        elif isinstance(fact, Array):
            for array in counted(self, fact):
                yield from write_array(self, array)
        else:
            yield from write_object(self, fact)

    def string(self, fact: String) -> Schema:
        patterns = fact.patterns
        if any(map(NUMBERED.search, fact.values or ())) or any(map(NUMBERED_CODE.search, patterns)):
            what = "has control characters in a text, beside objects with known names among others"
            self.numbered = self.refusal(what, *(("const", "enum") if fact.values else ("pattern", "format")))
        if fact.excluded:
            if max(len(text) for text in fact.excluded) > MAX_EXCLUDED:
                raise self.refusal(f"excludes text longer than {MAX_EXCLUDED} characters", "not", "oneOf", "if")
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
