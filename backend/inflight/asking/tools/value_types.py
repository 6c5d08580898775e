"""Which kinds of values a parameter's schema allows, where a syntax does not say what a value is."""

from __future__ import annotations

import json
import re
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_DEPTH = 16
"""Of references and alternatives that are followed."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_WORDS = ("true", "false", "null")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class SchemaTypes:
    """Of the values within one tool's schema. The work is linear in it: what a reference leads to is looked at once."""

    def __init__(self, root: dict[str, Any]) -> None:
        """`root`: what references lead into."""
        self._root = root
        self._found: dict[str, frozenset[str]] = {}

    def of(self, schema: Any, depth: int = MAX_DEPTH) -> frozenset[str]:
        """JSON schema's names of types; all of them if the schema does not say."""
        if not isinstance(schema, dict) or not depth:
            return TYPES
        found = TYPES
        named = schema.get("type")
        if isinstance(named, str):
            found &= {named}
        elif isinstance(named, list):
            found &= {each for each in named if isinstance(each, str)}
        if "const" in schema:
            found &= {type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            found &= set(map(type_of, schema["enum"]))
        if isinstance(schema.get("$ref"), str):
            found &= self._behind(schema["$ref"], depth)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                found &= {name for each in schema[key] for name in self.of(each, depth - 1)}
        for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found &= self.of(each, depth - 1)
        return frozenset(found or TYPES)

    def _behind(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._found:
            self._found[reference] = TYPES  # also if it leads to itself
            self._found[reference] = self.of(referred(reference, self._root), depth - 1)
        return self._found[reference]


def referred(reference: Any, root: dict[str, Any]) -> Any:
    """What a reference within the schema leads to; {} if it leads elsewhere."""
    found: Any = root
    path = reference.split("/") if isinstance(reference, str) else [""]
    for part in path[1:] if path[0] == "#" else [""]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return {} if found is None else found


def type_of(value: Any) -> str:
    """Of a value of JSON."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def typed(text: str, types: frozenset[str]) -> str | None:
    """A number or a word that a model wrote, as JSON, if it is of one of these types; words also as Python has them."""
    written = _PYTHON_WORDS.get(text, text)
    if written not in _WORDS and not _NUMBER.fullmatch(written):
        return None
    own = type_of(json.loads(written))
    return written if own in types or (own == "integer" and "number" in types) else None
