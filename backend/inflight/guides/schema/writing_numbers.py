"""Facts about numbers, written as schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from inflight.guides.limits import PARSER_LIMITS
from inflight.guides.schema.facts import Number
from inflight.guides.schema.writing_objects import compiles

if TYPE_CHECKING:
    from inflight.guides.schema.writing import Schema, Writing

MAX_INTEGER = 2**53
"""Numbers beyond are not exact in JSON (RFC 8259, 6)."""
MAX_STEP = 2_000
"""Of `multipleOf`, in units of its last digit. The library makes a state of each remainder: of 2,000 it finds all in
about 5 ms, of 10,000 in 50 ms, and of millions it does not end (2026-11-26)."""
SMALL_STEP = 64
"""Units of those that are followed between any bounds. Larger ones are tried, with their bounds."""
MAX_TRIED = 4
"""Different larger ones in one guide: each takes up to some 10 ms."""
LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
"""A negation makes one of the other."""
MAX_LISTED = 256
"""Multiples between two bounds that are listed instead."""


def plain(writing: Writing, number: Fraction, *keywords: str) -> int | float:
    """As JSON has it. Raises GuideRefused where that would not be the same number. `keywords`: see Writing.refusal."""
    if number.denominator == 1 and abs(number) <= MAX_INTEGER:
        return int(number)
    value = float(number) if abs(number) < MAX_INTEGER else 0.0
    if Fraction(str(value)) != number or abs(value) < 1e-9:
        raise writing.refusal("has a number beyond what is exact", *keywords)
    return value


def write_number(writing: Writing, fact: Number) -> Iterator[Schema]:
    if fact.values is not None:
        yield _listed(writing, fact.values)
        return
    if fact.is_fractional:
        refused = writing.refusal("excludes integers among numbers", "not", "oneOf", "if", "type", "multipleOf")
        writing.expansion.omissions.drop(refused, refused.spots)
    free = replace(fact, excluded=frozenset())
    cuts = [value for value in sorted(fact.excluded) if free.takes(value)]
    for low, high in pairwise((None, *cuts, None)):
        part = free.merged(Number(low, high, is_low_open=low is not None, is_high_open=high is not None))
        if part is not None:
            yield from _range(writing, part)


def _range(writing: Writing, fact: Number) -> Iterator[Schema]:
    """Of numbers without exceptions."""
    if fact.values is not None:
        yield _listed(writing, fact.values)
    elif fact.is_integer or fact.step is not None:
        step = fact.step or Fraction(1)
        if fact.is_integer or step.denominator == 1:
            yield from _steps(writing, replace(fact, is_integer=True, step=Fraction(step.numerator)))
            return
        for each in (step, *_coarser(step)):
            yield from _steps(writing, replace(fact, step=each))
    else:
        yield from _bounded(writing, fact)


def _steps(writing: Writing, fact: Number) -> Iterator[Schema]:
    """Of multiples between bounds, which are made multiples, too: the library's own rounding is not asked."""
    step = fact.step or Fraction(1)
    first = last = None
    if fact.low is not None:
        first = (fact.low / step).__floor__() + 1 if fact.is_low_open else (fact.low / step).__ceil__()
    if fact.high is not None:
        last = (fact.high / step).__ceil__() - 1 if fact.is_high_open else (fact.high / step).__floor__()
    if first is not None and last is not None:
        if first > last:
            return
        if _units(step) > SMALL_STEP and last - first < MAX_LISTED:
            yield _listed(writing, frozenset(step * number for number in range(first, last + 1)))
            return
    low, high = (None if number is None else step * number for number in (first, last))
    if step != 1:
        _check_step(writing, step)
    yield from _bounded(writing, Number(low, high, is_integer=fact.is_integer, step=None if step == 1 else step))


def _bounded(writing: Writing, fact: Number) -> Iterator[Schema]:
    schema: dict[str, Any] = {"type": "integer" if fact.is_integer else "number"}
    if fact.low is not None:
        schema["exclusiveMinimum" if fact.is_low_open else "minimum"] = plain(writing, fact.low, *LOW, *HIGH)
    if fact.high is not None:
        schema["exclusiveMaximum" if fact.is_high_open else "maximum"] = plain(writing, fact.high, *HIGH, *LOW)
    if fact.step is not None:
        schema["multipleOf"] = plain(writing, fact.step, "multipleOf")
        if _units(fact.step) > SMALL_STEP:
            text = json.dumps(schema)
            writing.tried_numbers.add(text)
            if len(writing.tried_numbers) > MAX_TRIED or not _is_followed(text):
                raise writing.refusal("asks for multiples of a number that take too much work", "multipleOf")
    yield schema
    if left_out := frozenset(filter(fact.takes, _beginnings(fact))):
        yield _listed(writing, left_out)


def _listed(writing: Writing, values: frozenset[Fraction]) -> Schema:
    return {"enum": [plain(writing, value, "enum", "const", *LOW, *HIGH) for value in sorted(values)]}


def _units(step: Fraction) -> int:
    """How many units of its last decimal place it has."""
    return int(step * 10 ** _places(step))


def _places(step: Fraction) -> int:
    """Behind its point."""
    return next(places for places in count() if (step * 10**places).denominator == 1)


def _coarser(step: Fraction) -> Iterator[Fraction]:
    """Steps of the multiples with fewer places: of those of 0.25 the library takes 0.50 and not 0.5."""
    if _units(step) > 1:
        for places in range(1, _places(step)):
            yield Fraction(math.lcm(step.numerator * 10**places, step.denominator), step.denominator * 10**places)


def _check_step(writing: Writing, step: Fraction) -> None:
    units = _units(step)
    if units > MAX_STEP:
        raise writing.refusal(f"asks for multiples of a number of more than {MAX_STEP} units", "multipleOf")
    if step.denominator != 1 and compiles({"type": "number", "multipleOf": plain(writing, step, "multipleOf")}):
        raise writing.refusal("asks for multiples of a fraction that is not exact in the library", "multipleOf")


class _Digits:
    """A vocabulary with all numbers of up to three digits, which the tokens of models have: a mask looks at the
    remainders of all of them."""

    eos_token_id = 0
    bos_token_id = None
    tokens = (
        b"<end>",
        *(bytes((value,)) for value in range(256)),
        *(str(number).zfill(digits).encode() for digits in (2, 3) for number in range(10**digits)),
    )
    special_token_ids = (0,)

    def __call__(self, text: str | bytes) -> list[int]:
        return [1 + byte for byte in (text.encode() if isinstance(text, str) else text)]


@lru_cache(maxsize=1)
def _digits() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Digits()))


@lru_cache(maxsize=256)
def _is_followed(schema: str) -> bool:
    """Whether the work that a mask may take is enough for the first one of such a number, which has most to look at."""
    matcher = LLMatcher(_digits(), LLMatcher.grammar_from_json_schema(schema), log_level=0, limits=PARSER_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not matcher.is_error()


def _beginnings(fact: Number) -> Iterator[Fraction]:
    """Values whose digits the digits of a bound begin with, as 2.2 those of 2.25: the library leaves them out."""
    for bound in (fact.low, fact.high):
        scale = 10
        while bound is not None and (bound * scale).denominator != 1:
            yield Fraction(int(bound * scale), scale)
            scale *= 10
