"""Which kinds of values a parameter's schema allows, where a syntax does not say what a value is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
MAX_DEPTH = 16
"""Of references and alternatives that are followed."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_WORDS = ("true", "false", "null")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def types_of(schema: Any, root: dict[str, Any], depth: int = MAX_DEPTH) -> frozenset[str]:
    """JSON schema's names of types; all of them if the schema does not say. `root`: what its references lead into."""
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
    if "$ref" in schema:
        found &= types_of(referred(schema["$ref"], root), root, depth - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= _any(types_of(each, root, depth - 1) for each in schema[key])
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= types_of(each, root, depth - 1)
    return frozenset(found or TYPES)


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


def _any(types: Iterable[frozenset[str]]) -> set[str]:
    return {name for each in types for name in each}
