"""JSON schemas by keyword and of the kinds that people use, each with values that follow it and values that do not
(`ci/unit/guides/schema/corpus`), and the texts in which a model would write them.

A folder of the same form as the official suite's (https://github.com/json-schema-org/JSON-Schema-Test-Suite: lists of
schemas with tests) is read as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema_rs

FOLDER = Path(__file__).resolve().parents[1] / "unit" / "guides" / "schema" / "corpus"
OF_ANNOTATIONS = "is only an annotation"
"""In the official suite's descriptions."""
MAX_PERMUTED = 4
"""Keys of an object that are tried in any order."""


@dataclass(frozen=True)
class Case:
    name: str
    """Its file's name, and its own within that: "numbers/minimum"."""
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


@lru_cache(maxsize=1)
def corpus() -> tuple[Case, ...]:
    return tuple(
        Case(f"{path.stem}/{each['name']}", each["schema"], tuple(each["valid"]), tuple(each["invalid"]))
        for path in sorted(FOLDER.glob("*.json"))
        for each in json.loads(path.read_text())
    )


def official_cases(folder: Path) -> Iterator[Case]:
    """Of all files below it. A name has the file's path, the schema's description and its place in the file. Formats
    are asserted here (Validation, 7.2.2), so values that are valid only where they are annotations are left out."""
    for path in sorted(folder.rglob("*.json")):
        for place, group in enumerate(json.loads(path.read_text())):
            values: dict[bool, list[Any]] = {True: [], False: []}
            for test in group["tests"]:
                if OF_ANNOTATIONS in test["description"]:
                    continue
                values[test["valid"]].append(test["data"])
            name = f"{path.relative_to(folder).with_suffix('')}/{place} {group['description']}"
            yield Case(name, group["schema"], tuple(values[True]), tuple(values[False]))


def validator(schema: Any) -> jsonschema_rs.Draft202012Validator:
    """That asserts formats."""
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


def texts(value: Any, schema: Any) -> tuple[str, ...]:
    """As `json.dumps` writes it, characters beyond ASCII as they are, with keys in orders that a grammar may ask for:
    as they come; that of the schema's `properties`, outer ones first or as they stand in its text; any, of few."""
    orders = [_ranks(_names(schema, is_outer_first)) for is_outer_first in (True, False)]
    written = [value, *(_ordered(value, ranks) for ranks in orders)]
    if isinstance(value, dict) and len(value) <= MAX_PERMUTED:
        written += map(dict, permutations(value.items()))
    return tuple(dict.fromkeys(json.dumps(each, ensure_ascii=False) for each in written))


def with_integers(value: Any) -> Any:
    """The same value, its whole numbers as integers: JSON Schema does not tell 1.0 and 1 apart (Core, 4.2.2)."""
    if isinstance(value, list):
        return [with_integers(each) for each in value]
    if isinstance(value, dict):
        return {name: with_integers(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def escaped(text: str) -> str:
    """The same JSON with characters beyond ASCII as escapes."""
    return "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in text)


def _ranks(names: Iterable[str]) -> dict[str, int]:
    """Name -> place of its first occurrence."""
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _names(schema: Any, is_outer_first: bool) -> Iterator[str]:
    """Of properties, then of what is required."""
    for keyword in ("properties", "required"):
        for found in _values_of(keyword, schema, is_outer_first):
            yield from (name for name in found if isinstance(name, str))


def _values_of(keyword: str, schema: Any, is_outer_first: bool) -> Iterator[Any]:
    if isinstance(schema, dict):
        if is_outer_first and isinstance(schema.get(keyword), (dict, list)):
            yield schema[keyword]
        for name, inner in schema.items():
            if not is_outer_first and name == keyword and isinstance(inner, (dict, list)):
                yield inner
            yield from _values_of(keyword, inner, is_outer_first)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _values_of(keyword, inner, is_outer_first)


def _ordered(value: Any, ranks: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_ordered(each, ranks) for each in value]
    if isinstance(value, dict):
        return {key: _ordered(value[key], ranks) for key in sorted(value, key=lambda key: ranks.get(key, len(ranks)))}
    return value


def read_json(text: str) -> Any:
    """With numbers beyond those of 64 bits as the largest of these: validators know no others."""
    return json.loads(text, parse_float=lambda digits: max(-sys.float_info.max, min(float(digits), sys.float_info.max)))
