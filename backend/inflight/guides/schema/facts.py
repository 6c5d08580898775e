"""What is known of a value of one type: the keywords of all schemas that hold for it, merged.

A schema is a union of such facts, and its complement too, so that `allOf`, `oneOf`, `if` and `not` are products of
unions. Schemas of items and properties stay as they are, as claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from inflight.guides.schema.documents import Place


@dataclass(frozen=True)
class Claim:
    """That a schema holds, or does not."""

    place: Place
    holds: bool = True


@dataclass(frozen=True)
class Null:
    type = "null"

    def merged(self, other: Null) -> Null | None:
        return self


@dataclass(frozen=True)
class Boolean:
    values: frozenset[bool] = frozenset({False, True})
    type = "boolean"

    def merged(self, other: Boolean) -> Boolean | None:
        both = self.values & other.values
        return Boolean(both) if both else None


@dataclass(frozen=True)
class Number:
    low: Fraction | None = None
    high: Fraction | None = None
    is_low_open: bool = False
    is_high_open: bool = False
    is_integer: bool = False
    is_fractional: bool = False
    """No integer."""
    step: Fraction | None = None
    values: frozenset[Fraction] | None = None
    excluded: frozenset[Fraction] = frozenset()
    type = "number"

    def merged(self, other: Number) -> Number | None:
        values = self.values
        if other.values is not None:
            values = other.values if values is None else values & other.values
        low = max(((n.low, n.is_low_open) for n in (self, other) if n.low is not None), default=(None, False))
        high = min(((n.high, not n.is_high_open) for n in (self, other) if n.high is not None), default=(None, True))
        step = self.step or other.step
        if self.step and other.step:
            a, b = self.step, other.step
            step = Fraction(
                math.lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator
            )
        both = Number(
            low[0],
            high[0],
            low[1],
            not high[1],
            self.is_integer or other.is_integer,
            self.is_fractional or other.is_fractional,
            step,
            values,
            self.excluded | other.excluded,
        )
        if values is not None:
            kept = frozenset(value for value in values if both.takes(value))
            return Number(values=kept) if kept else None
        if both.is_integer and both.is_fractional:
            return None
        if both.low is not None and both.high is not None:
            is_open = both.is_low_open or both.is_high_open
            if both.low > both.high or (both.low == both.high and is_open):
                return None
            if both.low == both.high:
                return Number(values=frozenset({both.low})) if both.takes(both.low) else None
        return both

    def takes(self, value: Fraction) -> bool:
        is_whole = value.denominator == 1
        return not (
            (self.low is not None and (value < self.low or (self.is_low_open and value == self.low)))
            or (self.high is not None and (value > self.high or (self.is_high_open and value == self.high)))
            or (self.is_integer and not is_whole)
            or (self.is_fractional and is_whole)
            or (self.step is not None and (value / self.step).denominator != 1)
            or value in self.excluded
        )


@dataclass(frozen=True)
class String:
    shortest: int = 0
    longest: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    values: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    type = "string"

    def merged(self, other: String) -> String | None:
        values = self.values
        if other.values is not None:
            values = other.values if values is None else values & other.values
        both = String(
            max(self.shortest, other.shortest),
            least(self.longest, other.longest),
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            tuple(dict.fromkeys(self.formats + other.formats)),
            values,
            self.excluded | other.excluded,
        )
        longest = math.inf if both.longest is None else both.longest
        if values is not None:
            kept = frozenset(v for v in values - both.excluded if both.shortest <= len(v) <= longest)
            return replace(both, values=kept, shortest=0, longest=None, excluded=frozenset()) if kept else None
        return both if both.shortest <= longest else None


@dataclass(frozen=True)
class Contains:
    claim: Claim
    least: int
    most: int | None


@dataclass(frozen=True)
class Array:
    shortest: int = 0
    longest: int | None = None
    items: tuple[tuple[int, int | None, Claim], ...] = ()
    """From which index to which one, exclusively, each claim holds."""
    contains: tuple[Contains, ...] = ()
    is_unique: bool = False
    seen: int | None = 0
    """How many items keywords have looked at, for `unevaluatedItems`. None: all."""
    type = "array"

    def merged(self, other: Array) -> Array | None:
        longest = least(self.longest, other.longest)
        shortest = max(self.shortest, other.shortest)
        if longest is not None and shortest > longest:
            return None
        return Array(
            shortest,
            longest,
            tuple(dict.fromkeys(self.items + other.items)),
            tuple(dict.fromkeys(self.contains + other.contains)),
            self.is_unique or other.is_unique,
            None if self.seen is None or other.seen is None else max(self.seen, other.seen),
        )

    def claims(self, index: int) -> frozenset[Claim]:
        return frozenset(c for start, stop, c in self.items if start <= index and (stop is None or index < stop))


@dataclass(frozen=True)
class Rest:
    """A claim about the properties that have none of the names and match none of the patterns."""

    names: frozenset[str]
    patterns: tuple[str, ...]
    claim: Claim


@dataclass(frozen=True)
class Object:
    fewest: int = 0
    most: int | None = None
    named: tuple[tuple[str, Claim], ...] = ()
    patterned: tuple[tuple[str, Claim], ...] = ()
    rests: tuple[Rest, ...] = ()
    required: tuple[str, ...] = ()
    names: tuple[Claim, ...] = ()
    seen: frozenset[str] = frozenset()
    seen_patterns: tuple[str, ...] = ()
    has_seen_all: bool = False
    """What keywords have looked at, for `unevaluatedProperties`."""
    type = "object"

    def merged(self, other: Object) -> Object | None:
        most = least(self.most, other.most)
        required = tuple(dict.fromkeys(self.required + other.required))
        fewest = max(self.fewest, other.fewest)
        if most is not None and max(fewest, len(required)) > most:
            return None
        return Object(
            fewest,
            most,
            tuple(dict.fromkeys(self.named + other.named)),
            tuple(dict.fromkeys(self.patterned + other.patterned)),
            tuple(dict.fromkeys(self.rests + other.rests)),
            required,
            tuple(dict.fromkeys(self.names + other.names)),
            self.seen | other.seen,
            tuple(dict.fromkeys(self.seen_patterns + other.seen_patterns)),
            self.has_seen_all or other.has_seen_all,
        )


Fact = Null | Boolean | Number | String | Array | Object
Union_ = tuple[Fact, ...]
ANY: Union_ = (Null(), Boolean(), Number(), String(), Array(), Object())


def least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def without(type_name: str, *kept: Fact) -> Union_:
    return (*(fact for fact in ANY if fact.type != type_name), *kept)


def either(unions: Iterable[Union_]) -> Union_:
    return tuple(dict.fromkeys(fact for union in unions for fact in union))
