"""What a schema says of a value's type, and which numbers and words are of one."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.asking.tools.value_types import TYPES, SchemaTypes, typed

ROOT: dict[str, Any] = {
    "$defs": {
        "count": {"type": "integer"},
        "both": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/circle"}]},
        "a/b": {"type": "boolean"},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string", "description": "x"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, TYPES),
        ({"const": 2.0}, {"integer"}),
        ({"$ref": "#/$defs/both"}, {"integer", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"null"}),
        ({"$ref": "#/$defs/circle"}, TYPES),
        ({"$ref": "https://example.com/schema"}, TYPES),
        ({"type": "unheard of"}, TYPES),
        ({}, TYPES),
        (True, TYPES),
    ],
)
def test_the_types_of_a_schema(schema: Any, types: set[str]) -> None:
    assert SchemaTypes(ROOT).of(schema) == types


@pytest.mark.parametrize(
    ("written", "types", "read"),
    [
        ("12", {"integer"}, "12"),
        ("12", {"number"}, "12"),
        ("12.5", {"integer"}, None),
        ("12.5", {"number", "string"}, "12.5"),
        ("1e999", {"number"}, "1e999"),
        ("012", {"integer"}, None),
        ("NaN", {"number"}, None),
        ("True", {"boolean"}, "true"),
        ("None", {"null"}, "null"),
        ("true", {"string"}, None),
        ("", {"null"}, None),
    ],
)
def test_a_number_or_a_word_is_of_a_type(written: str, types: set[str], read: str | None) -> None:
    assert typed(written, frozenset(types)) == read
