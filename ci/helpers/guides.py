"""Grammars with checks of what they produce, and grammars that are built to do harm."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from inflight.guided_decoding import GuidedDecodingParams, GuideType


def guide(guide_type: GuideType, text: str = "") -> GuidedDecodingParams:
    return GuidedDecodingParams(guide_type=guide_type, guide=text)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age", "pets"],
}
CODE = r"[A-Z]{2}-[0-9]{3}(x|yy)?"
SUM = 'root ::= term ("+" term){1,4}\nterm ::= [1-9] | "(" [1-9] "*" [1-9] ")"'
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": {"enum": ["up", "down"]}},
        "end": "</call>",
    },
}


def is_person(text: str) -> bool:
    value: dict[str, Any] = json.loads(text)
    return (
        {"name", "age", "pets"} <= value.keys() <= {"name", "age", "pets", "tall"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(value["pets"]) <= 3
        and set(value["pets"]) <= {"cat", "dog"}
        and isinstance(value.get("tall", True), bool)
    )


def is_sum(text: str) -> bool:
    return re.fullmatch(r"([1-9]|\([1-9]\*[1-9]\))(\+([1-9]|\([1-9]\*[1-9]\))){1,4}", text) is not None


GUIDES: dict[str, tuple[GuidedDecodingParams, Callable[[str], bool]]] = {
    "json": (guide(GuideType.JSON), lambda text: isinstance(json.loads(text), dict)),
    "json_schema": (guide(GuideType.JSON_SCHEMA, json.dumps(PERSON)), is_person),
    "regex": (guide(GuideType.REGEX, CODE), lambda text: re.fullmatch(CODE, text) is not None),
    "ebnf_grammar": (guide(GuideType.EBNF_GRAMMAR, SUM), is_sum),
    "structural_tag": (
        guide(GuideType.STRUCTURAL_TAG, json.dumps(CALL)),
        lambda text: text in ('<call>"up"</call>', '<call>"down"</call>'),
    ),
}
"""Type -> a grammar, and whether a text follows it."""


def _counted(depth: int) -> dict[str, Any]:
    """Objects in objects, each of which is one of many alternatives."""
    within: dict[str, Any] = _counted(depth - 1) if depth else {}
    return {"type": "object", "properties": {f"p{n}": within for n in range(6)}, "minProperties": 3}


BOMBS: dict[str, GuidedDecodingParams] = {
    "nested repetitions": guide(GuideType.REGEX, "((a{0,1000}){0,1000}){0,1000}"),
    "optional parts in a row": guide(GuideType.EBNF_GRAMMAR, "root ::= " + '"a"? ' * 1500),
    "nothing": guide(GuideType.EBNF_GRAMMAR, "root ::= root"),
    "itself": guide(GuideType.JSON_SCHEMA, '{"$ref": "#"}'),
    "no grammar": guide(GuideType.EBNF_GRAMMAR, "root ::= ((("),
    "no expression": guide(GuideType.REGEX, "[a-"),
    "no schema": guide(GuideType.JSON_SCHEMA, '{"type": "nonsense"}'),
    "counted properties within each other": guide(GuideType.JSON_SCHEMA, json.dumps(_counted(3))),
    "no tags": guide(GuideType.STRUCTURAL_TAG, '{"type": "structural_tag"}'),
}
"""Refused where they arrive."""

HEAVY: dict[str, GuidedDecodingParams] = {
    "stars in a row": guide(GuideType.REGEX, "([a-z]+)*" * 100),
    "rules that double": guide(
        GuideType.EBNF_GRAMMAR,
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1} | r{i + 1}\n" for i in range(60)) + 'r60 ::= "a" | ""',
    ),
}
"""Followed within the library's limits, or ended by them."""
