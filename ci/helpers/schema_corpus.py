"""JSON schemas by keyword and of the kinds that people use, each with values that follow it and values that do not
(`ci/unit/guides/schema/corpus`), and the texts in which a model would write them.

A folder of the same form as the official suite's (https://github.com/json-schema-org/JSON-Schema-Test-Suite: lists of
schemas with tests) is read as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema_rs

FOLDER = Path(__file__).resolve().parents[1] / "unit" / "guides" / "schema" / "corpus"


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
    """Of all files below it. A name has the file's path, the schema's description and its place in the file."""
    for path in sorted(folder.rglob("*.json")):
        for place, group in enumerate(json.loads(path.read_text())):
            values: dict[bool, list[Any]] = {True: [], False: []}
            for test in group["tests"]:
                values[test["valid"]].append(test["data"])
            name = f"{path.relative_to(folder).with_suffix('')}/{place} {group['description']}"
            yield Case(name, group["schema"], tuple(values[True]), tuple(values[False]))


def validator(schema: Any) -> jsonschema_rs.Draft202012Validator:
    """That asserts formats."""
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


def texts(value: Any, schema: Any) -> tuple[str, ...]:
    """As `json.dumps` writes it: with keys as they come and in the order of the schema's `properties`, which grammars
    follow; characters beyond ASCII as they are."""
    ordered = _ordered(value, _ranks(schema))
    return tuple(dict.fromkeys(json.dumps(each, ensure_ascii=False) for each in (value, ordered)))


def escaped(text: str) -> str:
    """The same JSON with characters beyond ASCII as escapes."""
    return "".join(char if char.isascii() else json.dumps(char)[1:-1] for char in text)


def _ranks(schema: Any) -> dict[str, int]:
    """Place of each name at its first occurrence in `properties`, then in `required`."""
    names: dict[str, None] = {}
    for keyword in ("properties", "required"):
        for found in _values_of(keyword, schema):
            names.update(dict.fromkeys(each for each in found if isinstance(each, str)))
    return {name: place for place, name in enumerate(names)}


def _values_of(keyword: str, schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        if isinstance(schema.get(keyword), (dict, list)):
            yield schema[keyword]
        for inner in schema.values():
            yield from _values_of(keyword, inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _values_of(keyword, inner)


def _ordered(value: Any, ranks: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_ordered(each, ranks) for each in value]
    if isinstance(value, dict):
        return {key: _ordered(value[key], ranks) for key in sorted(value, key=lambda key: ranks.get(key, len(ranks)))}
    return value
