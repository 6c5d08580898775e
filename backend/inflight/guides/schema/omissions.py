"""What a schema that is not strict goes without: keywords that cannot be expressed, or not together with others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from inflight.guides.refusal import GuideRefused, Spot
from inflight.guides.schema.documents import Documents, Place, escaped
from inflight.guides.schema.keywords import ARRAYS, KNOWN, NUMBERS, OBJECTS, REFERENCES, STRINGS

IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
"""Whose schemas say more of the same value, beside those that are referred to."""
LOOKING = frozenset(
    {"prefixItems", "items", "additionalItems", "contains", "unevaluatedItems"}
    | {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", *REFERENCES, *IN_PLACE}
)
"""Keywords that look at items or properties: the others are unevaluated."""


class Omissions:
    """Of one schema. What cannot be expressed is omitted where it is read. What cannot be written is known only behind
    all that was read, so that the schema is read once more without it."""

    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self.omitted: dict[Spot, None] = {}
        """Keywords that are not read at all."""
        self._dropped: dict[Spot, None] = {}
        self._found: dict[Spot, None] = {}
        self._last: GuideRefused | None = None

    def drop(self, refused: GuideRefused, spots: Collection[Spot]) -> None:
        """Omit what has just been read. Raises `refused` where that must not be."""
        if self._is_strict or refused.is_final or not spots:
            raise refused
        self._dropped |= dict.fromkeys(spots)

    def postpone(self, refused: GuideRefused) -> None:
        """Omit its spots from the next reading on. Raises `refused` where that must not be."""
        if self._is_strict or refused.is_final or not refused.spots:
            raise refused
        self._found |= dict.fromkeys(refused.spots)
        self._last = refused

    def close(self) -> GuideRefused | None:
        """What the reading that has ended was refused for; None = for nothing."""
        self.omitted |= self._found
        last, self._last = self._last, None
        self._found = {}
        if last is not None:
            self._dropped = {}
        return last

    @property
    def named(self) -> tuple[Spot, ...]:
        """All of the last reading."""
        return tuple(self.omitted | self._dropped)

    def blinds(self, documents: Documents, place: Place) -> bool:
        """Whether something is omitted that would look at items or properties of the values of `place`."""
        gone = self.omitted | self._dropped
        return bool(gone) and any(
            (each.pointer, keyword) in gone for each in in_place(documents, [place]) for keyword in LOOKING
        )


def in_place(documents: Documents, places: Iterable[Place]) -> list[Place]:
    """These and all that say more of the same values."""
    found: dict[str, Place] = {}
    left = list(places)
    for place in left:
        if place.pointer not in found and isinstance(place.schema, dict):
            found[place.pointer] = place
            left += _beside(documents, place)
    return list(found.values())


def _beside(documents: Documents, place: Place) -> Iterator[Place]:
    for keyword in place.schema.keys() & set(IN_PLACE):
        pointer, value = f"{place.pointer}/{escaped(keyword)}", place.schema[keyword]
        steps = range(len(value)) if isinstance(value, list) else value if keyword.startswith("depend") else ()
        for each in (pointer, *(f"{pointer}/{escaped(step)}" for step in steps)):
            if each in documents.places:
                yield documents.within(documents.places[each], place.scope)
    for keyword in place.schema.keys() & set(REFERENCES):
        try:
            yield documents.follow(place, keyword)
        except GuideRefused:  # it was omitted
            continue


def at_fault(
    documents: Documents, places: list[Place], keywords: tuple[str, ...], omitted: Collection[Spot]
) -> tuple[Spot, ...]:
    """Of what `places` and those in place say together: all spots of the first of `keywords` that is there; otherwise
    of all that say something of the same kind; otherwise all of `places`. Empty: all of it is omitted already."""
    said = [spot for place in in_place(documents, places) for spot in _said(documents, place) if spot not in omitted]
    kind = next((kind for kind in (NUMBERS, STRINGS, ARRAYS, OBJECTS) if keywords[0] in kind), ())
    for group in (*((keyword,) for keyword in keywords), (*kind, "const", "enum")):
        if found := [spot for spot in said if spot[1] in group]:
            return tuple(dict.fromkeys(found))
    own = {place.pointer for place in places}
    return tuple(dict.fromkeys(spot for spot in said if spot[0] in own))


def _said(documents: Documents, place: Place) -> Iterator[Spot]:
    """Pointers and keywords of a schema; of a constant within another one, the keyword that holds both."""
    pointer, keyword = place.pointer, ""
    while pointer not in documents.places:
        pointer, _, keyword = pointer.rpartition("/")
    if keyword:
        yield pointer, keyword
    elif documents.places[pointer].schema is not place.schema:
        yield from ((pointer, each) for each in ("const", "enum") if each in documents.places[pointer].schema)
    else:
        yield from ((pointer, each) for each in place.schema if each in KNOWN)
