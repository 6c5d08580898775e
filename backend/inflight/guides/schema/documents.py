"""Where the references of a schema lead: JSON pointers, anchors and embedded documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from inflight.guides.refusal import GuideRefused
from inflight.guides.schema.keywords import MANY_SCHEMAS, NAMED_SCHEMAS, ONE_SCHEMA

MAX_SCHEMAS = 20_000
"""Schemas within one guide."""
MAX_DEPTH = 64
"""Schemas within one another."""
OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
"""Of whose schemas `$ref` replaces what stands beside it."""


def escaped(step: str | int) -> str:
    return str(step).replace("~", "~0").replace("/", "~1")


@dataclass(frozen=True, eq=False)
class Place:
    """One schema of a guide."""

    schema: Any
    pointer: str
    base: str
    """URI that its references are relative to."""
    is_old: bool = False
    scope: tuple[str, ...] = ()
    """Base URIs of the resources that lead to it, the outermost first. Empty unless it decides what a dynamic reference
    means."""

    def child(self, *steps: str | int) -> Any:
        """The value behind `steps`."""
        value = self.schema
        for step in steps:
            value = value[step]
        return value


class Documents:
    """All schemas of one guide by pointer, and its identifiers and anchors."""

    def __init__(self, root: Any) -> None:
        self.places: dict[str, Place] = {}
        self._roots: dict[str, str] = {"": ""}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[tuple[str, str], str] = {}
        self._scoped: dict[tuple[str, tuple[str, ...]], Place] = {}
        self._root = root
        is_old = isinstance(root, dict) and any(draft in str(root.get("$schema", "")) for draft in OLD_DRAFTS)
        self._enter(root, "", "", 0, is_old)
        names = [name for _, name in self._dynamic]
        self._has_scopes = len(set(names)) < len(names)
        self.root = self.within(self.places[""], ())

    def within(self, place: Place, scope: tuple[str, ...]) -> Place:
        """`place` as it is reached through `scope`."""
        if not self._has_scopes:
            return place
        if place.base not in scope:
            scope = (*scope, place.base)
        return self._scoped.setdefault((place.pointer, scope), replace(place, scope=scope))

    def _enter(self, schema: Any, pointer: str, base: str, depth: int, is_old: bool) -> Place:
        if depth > MAX_DEPTH:
            raise GuideRefused(f"has schemas within one another deeper than {MAX_DEPTH}", pointer=pointer[:80])
        if len(self.places) >= MAX_SCHEMAS:
            raise GuideRefused(f"has more than {MAX_SCHEMAS} schemas")
        if not isinstance(schema, (bool, dict)):
            raise GuideRefused("has a schema that is neither an object nor a boolean", pointer=pointer)
        if isinstance(schema, dict):
            base = self._identify(schema, pointer, base, is_old)
        place = self.places[pointer] = Place(schema, pointer, base, is_old)
        if isinstance(schema, dict):
            for steps, child in subschemas(schema):
                self._enter(child, pointer + "".join(f"/{escaped(s)}" for s in steps), base, depth + 1, is_old)
        return place

    def _identify(self, schema: dict[str, Any], pointer: str, base: str, is_old: bool) -> str:
        own = schema.get("$id", schema.get("id") if is_old else None)
        if isinstance(own, str) and not (is_old and "$ref" in schema):
            uri, fragment = urldefrag(_joined(base, own, pointer))
            if fragment and is_old:
                self._anchors[uri, fragment] = pointer
            elif uri:
                base = uri
                self._roots[base] = pointer
                if pointer == "":
                    self._roots[""] = ""
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(key), str):
                self._anchors[base, name] = pointer
                if key == "$dynamicAnchor":
                    self._dynamic[base, name] = pointer
        return base

    def follow(self, place: Place, keyword: str) -> Place:
        """The schema that `keyword` of `place` refers to. Raises GuideRefused where there is none in the guide."""
        reference = place.schema[keyword]
        if not isinstance(reference, str):
            what = "has a reference that is no text"
            raise GuideRefused(what, pointer=place.pointer, keyword=keyword, is_final=True)
        uri, fragment = urldefrag(_joined(place.base, reference, place.pointer))
        fragment = unquote(fragment)
        if uri not in self._roots:
            raise GuideRefused(
                f"refers to {reference[:80]!r}, which it does not hold",
                pointer=place.pointer,
                keyword=keyword,
                is_final=True,
            )
        if fragment == "" or fragment.startswith("/"):
            target = self._pointed(self._roots[uri] + fragment)
        else:
            target = self.places.get(self._anchors.get((uri, fragment), "-"))
            if keyword == "$dynamicRef" and target and self._dynamic.get((uri, fragment)) == target.pointer:
                # The first resource on the way here that has the anchor (Core, 8.2.3.2).
                outer = (self._dynamic[base, fragment] for base in place.scope if (base, fragment) in self._dynamic)
                target = self.places[next(outer, target.pointer)]
        if keyword == "$recursiveRef" and len(self._roots) > 2:
            raise GuideRefused("has a recursive reference among documents", pointer=place.pointer, keyword=keyword)
        if target is None:
            raise GuideRefused(
                f"refers to {reference[:80]!r}, where no schema is",
                pointer=place.pointer,
                keyword=keyword,
                is_final=True,
            )
        return self.within(target, place.scope)

    def _pointed(self, pointer: str) -> Place | None:
        if pointer in self.places:
            return self.places[pointer]
        value, base, walked = self._root, "", ""
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            walked += f"/{escaped(name)}"
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
            if walked in self.places:
                base = self.places[walked].base
        if walked in self.places:
            return self.places[walked]
        return self._enter(value, walked, base, 0, False)


def _joined(base: str, reference: str, pointer: str) -> str:
    try:
        if base.startswith("urn:") and not reference.partition("#")[0]:
            return base + reference
        return urljoin(base, reference)
    except ValueError as error:
        raise GuideRefused("has an identifier that is no URI", pointer=pointer) from error


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Steps to each schema that `schema` holds, and the schema."""
    for key in ONE_SCHEMA:
        if key in schema and not isinstance(schema[key], list):
            yield (key,), schema[key]
    for key in MANY_SCHEMAS:
        if isinstance(many := schema.get(key), list):
            for index, one in enumerate(many):
                yield (key, index), one
    for key in NAMED_SCHEMAS:
        if isinstance(named := schema.get(key), dict):
            for name, one in named.items():
                if not (key == "dependencies" and isinstance(one, list)):
                    yield (key, name), one
