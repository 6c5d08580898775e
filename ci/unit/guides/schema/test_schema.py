"""What the grammar of a prepared schema takes are exactly its instances, as another implementation judges them."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from grammar_acceptance import Acceptance
from schema_corpus import Case, corpus, texts, validator

from inflight.guided_decoding import WhiteSpace
from inflight.guides.lark.writer import HEADER
from inflight.guides.refusal import GuideRefused
from inflight.guides.schema import Prepared, prepare_schema
from inflight.guides.translate import SPACING


def written(prepared: Prepared) -> str:
    return f"{HEADER}start: %json {prepared.written(SPACING[WhiteSpace.DUMPS])}"


def can_be_enforced(schema: Any) -> bool:
    try:
        prepare_schema(schema)
    except GuideRefused:
        return False
    return True


def takes(prepared: Prepared, text: str) -> bool:
    return Acceptance(written(prepared)).takes(text)


POOL: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 7, 12, -1, 100, 1.5, -0.25, 2.25),
    *("", "a", "ab", "abc", "abcd", "b1", "é", "😀😀", "a b", 'q"q', "2026-02-28", "10.0.0.1"),
    *([], [1], [1, 2], [1, 1], ["a"], ["a", 1], [1, "a", None], [[1], [2]], [0, 0, 0, 0]),
    *({}, {"a": 1}, {"a": "x"}, {"b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": "y"}, {"a": 1, "c": 3}, {"a": {"a": {}}}),
    *({"kind": "cat", "lives": 9}, {"kind": "dog", "lives": 9}, {"kind": "dog", "loud": True}, {"next": None}),
    *({"next": {"next": None}}, {"next": {"next": 3}}, {"a": 1, "b": 2, "x1": 3}, {"x1": "one"}, {"x1": 1}),
]

INTEGER = {"type": "integer"}
KINDS: dict[str, Any] = {
    "type": {"type": ["integer", "null", "object"]},
    "untyped minimum": {"minimum": 2},
    "range": {"type": "number", "minimum": -1, "exclusiveMaximum": 2.25},
    "boolean exclusive": {
        "type": "integer",
        "minimum": 1,
        "exclusiveMinimum": True,
        "$schema": "http://json-schema.org/draft-04/schema#",
    },
    "multiples": {"multipleOf": 0.5},
    "two multiples": {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
    "lengths": {"minLength": 2, "maxLength": 3},
    "pattern": {"pattern": "^a|b$|\\d"},
    "pattern beside length": {"type": "string", "pattern": "b", "minLength": 3},
    "two patterns": {"allOf": [{"pattern": "a"}, {"pattern": "\\w\\s\\w"}]},
    "format": {"type": "string", "format": "ipv4"},
    "const": {"const": {"a": {"a": {}}}},
    "enumeration": {"enum": [None, 1, "a", [1, 2], {"a": 1}]},
    "enumeration of a type": {"type": "string", "enum": ["a", 1, "abc"]},
    "large enumeration": {"enum": [*(f"w{n}" for n in range(1000)), "abcd"]},
    "items": {"items": INTEGER, "minItems": 1, "maxItems": 3},
    "tuple": {"prefixItems": [INTEGER, {"type": "string"}], "items": False},
    "old tuple": {
        "items": [INTEGER],
        "additionalItems": {"type": "string"},
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "contains": {"contains": {"const": 1}},
    "contains twice": {"contains": {"const": 1}, "minContains": 2},
    "contains at most": {"contains": {"const": 1}, "minContains": 0, "maxContains": 1},
    "unique": {"type": "array", "items": {"enum": [1, 2, "a"]}, "uniqueItems": True},
    "properties": {"properties": {"a": INTEGER, "b": INTEGER}},
    "closed": {"properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False, "required": ["a"]},
    "others": {"properties": {"a": True}, "additionalProperties": INTEGER},
    "patterned": {"patternProperties": {"^x\\d$": INTEGER}, "properties": {"a": INTEGER}},
    "patterned and closed": {"patternProperties": {"^x": INTEGER}, "additionalProperties": False},
    "counts": {"type": "object", "minProperties": 2, "maxProperties": 2},
    "counts of optional": {"properties": {"a": True, "b": True}, "additionalProperties": False, "minProperties": 1},
    "patterned and listed names": {"patternProperties": {"^[ab]$": INTEGER}, "propertyNames": {"enum": ["a", "b"]}},
    "names": {"propertyNames": {"maxLength": 1}},
    "names of two rules": {"propertyNames": {"pattern": "[a-z]", "maxLength": 1}},
    "patterns that overlap": {
        "patternProperties": {"^x": INTEGER, "1$": {"not": {"const": 1}}, "[ab]": {"type": "string"}}
    },
    "patterns and a name apart": {
        "allOf": [
            {"patternProperties": {"a|x": INTEGER}},
            {"properties": {"a": True}, "additionalProperties": {"const": 3}},
        ]
    },
    "listed names": {"propertyNames": {"enum": ["a", "b"]}},
    "dependent required": {"dependentRequired": {"a": ["b"]}},
    "dependent schemas": {"dependentSchemas": {"b": {"properties": {"a": INTEGER}, "required": ["a"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}, "$schema": "http://json-schema.org/draft-07/schema#"},
    "all of": {
        "allOf": [{"properties": {"a": INTEGER}}, {"required": ["a"]}, {"properties": {"b": {"type": "string"}}}]
    },
    "any of": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "integer", "minimum": 7}, {"required": ["a"]}]},
    "one of kinds": {
        "oneOf": [
            {"properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind", "lives"]},
            {"properties": {"kind": {"const": "dog"}, "loud": {"type": "boolean"}}, "required": ["kind", "loud"]},
        ]
    },
    "one of overlapping": {"oneOf": [{"minimum": 2}, {"maximum": 7}]},
    "not a type": {"not": {"type": ["string", "object"]}},
    "not a constant": {"not": {"enum": [1, "a", "abc", None, True]}},
    "not a pattern": {"not": {"pattern": "^a|b$|\\d"}},
    "one of patterns": {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}, {"maxLength": 1}]},
    "not required": {"type": "object", "not": {"required": ["a"]}},
    "not both": {"not": {"required": ["a", "b"]}},
    "if": {
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"type": "array"},
    },
    "if alone": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "unevaluated properties": {
        "allOf": [{"properties": {"a": INTEGER}}],
        "properties": {"b": INTEGER},
        "unevaluatedProperties": False,
    },
    "unevaluated with any": {
        "anyOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": INTEGER}, "required": ["b"]}],
        "unevaluatedProperties": False,
    },
    "unevaluated items": {"allOf": [{"prefixItems": [INTEGER]}], "unevaluatedItems": False},
    "recursion": {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    "list": {
        "$defs": {
            "node": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]},
            "link": {"properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"], "type": "object"},
        },
        "$ref": "#/$defs/node",
    },
    "anchor": {"$defs": {"x": {"$anchor": "here", "type": "integer"}}, "$ref": "#here"},
    "embedded": {
        "$id": "http://a.example/root",
        "$defs": {"x": {"$id": "item", "type": "string"}},
        "items": {"$ref": "item"},
    },
    "dynamic": {
        "$dynamicAnchor": "tree",
        "properties": {"a": {"$dynamicRef": "#tree"}},
        "type": "object",
        "additionalProperties": False,
    },
    "annotations": {"title": "t", "description": "d", "default": 1, "examples": [1], "x-mine": 3, "favourite": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_grammar_takes_exactly_the_instances(kind: str) -> None:
    schema = KINDS[kind]
    prepared = prepare_schema(schema)
    judge = jsonschema_rs.validator_for(schema, validate_formats=True)
    wrong = []
    for instance in POOL:
        is_valid = judge.is_valid(instance)
        if takes(prepared, json.dumps(instance, ensure_ascii=False)) != is_valid:
            wrong.append((instance, is_valid))
    assert wrong == []
    assert prepared.not_enforced == ()


def combined(draw: random.Random, depth: int) -> Any:
    """A schema of schemas of KINDS, without those whose references are to the root."""
    if depth == 0 or draw.random() < 0.25:
        return draw.choice([schema for schema in KINDS.values() if "$" not in json.dumps(schema)])
    inner = [combined(draw, depth - 1) for _ in range(3)]
    return draw.choice(
        (
            {draw.choice(("allOf", "anyOf", "oneOf")): inner[: draw.randint(1, 3)]},
            {"not": inner[0]},
            {"if": inner[0], "then": inner[1], "else": inner[2]},
            {**inner[0], **inner[1]},
            {"properties": {draw.choice("ab"): inner[0]}, draw.choice(("minProperties", "maxProperties")): 1},
            {"items": inner[0]},
        )
    )


def test_grammar_of_combined_keywords_takes_exactly_the_instances() -> None:
    draw = random.Random(11)
    num_taken = num_left_out = 0
    for _ in range(150):
        schema = combined(draw, 2)
        try:
            prepared = prepare_schema(schema)
        except GuideRefused as refused:
            if not refused.is_final and refused.keyword:
                assert_loses_nothing(schema, [value for value in POOL if validator(schema).is_valid(value)])
                num_left_out += 1
            continue
        num_taken += 1
        grammar = Acceptance(written(prepared))
        judge = validator(schema)
        for instance in POOL:
            is_taken = any(map(grammar.takes, texts(instance, schema)))
            assert is_taken == judge.is_valid(instance), (schema, instance)
    assert num_taken > 60 and num_left_out > 20


REFUSED: dict[str, tuple[Any, str, str]] = {
    "look-ahead": ({"properties": {"a": {"pattern": "(?=b)c"}}}, "/properties/a", "pattern"),
    "back reference": ({"pattern": "(a)\\1"}, "", "pattern"),
    "anchor within": ({"pattern": "a$b"}, "", "pattern"),
    "format": ({"items": {"format": "regex"}}, "/items", "format"),
    "misspelt": ({"type": "integer", "minimun": 3}, "", "minimun"),
    "not a type": ({"type": "int"}, "", "type"),
    "absent document": ({"$ref": "http://a.example/b"}, "", "$ref"),
    "absent definition": ({"items": {"$ref": "#/$defs/a"}}, "/items", "$ref"),
    "own reference": ({"$ref": "#"}, "", ""),
    "not a number": ({"minimum": "3"}, "", "minimum"),
    "overlapping patterns": (
        {"patternProperties": {c: {"maximum": ord(c)} for c in "abcdefgh"}},
        "",
        "patternProperties",
    ),
    "unique strings": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "", "uniqueItems"),
    "not a format": ({"not": {"format": "ipv4"}}, "/not", "format"),
    "not a large pattern": ({"not": {"pattern": "(a|b)*a(a|b){30}"}}, "/not", "pattern"),
    "no instance": ({"allOf": [{"type": "string"}, {"type": "null"}]}, "", ""),
    "no schema": ({"properties": {"a": 3}}, "/properties/a", ""),
    "no finite instance": ({"required": ["a"], "type": "object", "properties": {"a": {"$ref": "#"}}}, "", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_pointer_and_keyword(name: str) -> None:
    schema, pointer, keyword = REFUSED[name]
    with pytest.raises(GuideRefused, match=r"^the guide ") as refused:
        prepare_schema(schema)
    assert (refused.value.pointer, refused.value.keyword) == (pointer, keyword)


def test_what_is_dropped_is_named() -> None:
    prepared = prepare_schema({"properties": {"a": {"not": {"format": "ipv4"}, "type": "string"}}}, is_strict=False)
    assert prepared.not_enforced == (("/properties/a/not", "format"),)
    assert takes(prepared, '{"a": "10.0.0.1"}') and not takes(prepared, '{"a": 1}')


NOT_STRICT = [case for case in corpus() if not can_be_enforced(case.schema)]


@pytest.mark.parametrize("case", NOT_STRICT, ids=lambda case: case.name)
def test_what_is_not_strict_loses_no_value_by_what_is_left_out(case: Case) -> None:
    """Also where it is found when the schema is written. Only what is beyond the bounds is refused; texts with control
    characters are lost beside open objects, see test_a_name_has_one_spelling."""
    try:
        assert_loses_nothing(case.schema, case.valid)
    except GuideRefused as refused:
        assert refused.is_final


def assert_loses_nothing(schema: Any, values: list[Any]) -> None:
    """Valid values of a schema that cannot be enforced are taken by what is made of it if it is not strict."""
    prepared = prepare_schema(schema, is_strict=False)
    assert prepared.not_enforced
    grammar = Acceptance(written(prepared))
    for value in values:
        spellings = texts(value, schema)
        assert any(map(grammar.takes, spellings)) or "\\u0000" in spellings[0], (schema, value)


INEXACT = 12345678901234567891
MANY = {f"p{n}": INTEGER for n in range(12)}
CLOSED = {"properties": MANY, "additionalProperties": False}
UNREAD = {"patternProperties": {"^(?!x)a": INTEGER}}
LEFT_OUT: dict[str, tuple[Any, set[tuple[str, str]]]] = {
    "of a schema that is referred to": (
        {"$defs": {"x": {"minProperties": 3}}, **CLOSED, "$ref": "#/$defs/x"},
        {("/$defs/x", "minProperties")},
    ),
    "of a dependency": (
        {**CLOSED, "dependentSchemas": {"p1": {"minProperties": 3}}},
        {("/dependentSchemas/p1", "minProperties")},
    ),
    "of a negation": ({"not": {"maximum": INEXACT}, "type": "integer"}, {("/not", "maximum")}),
    "of another name": ({"exclusiveMinimum": INEXACT, "type": "integer"}, {("", "exclusiveMinimum")}),
    "of an alternative": ({"oneOf": [{"const": "x" * 200}, {"pattern": "^x"}], "type": "string"}, {("", "oneOf")}),
    "with a value": ({"properties": {"a": {"enum": [{"b": INEXACT}]}}}, {("/properties/a", "enum")}),
    "many": (
        {"properties": {f"p{n}": {"type": "integer", "multipleOf": 99_991 + 2 * n} for n in range(30)}},
        {(f"/properties/p{n}", "multipleOf") for n in range(30)},
    ),
    "one behind another": (
        {"properties": {f"p{n}": {} for n in range(401)}, "propertyNames": {"format": "ipv4"}},
        {("", "properties"), ("", "propertyNames")},
    ),
    "and what is about it": (
        {"allOf": [UNREAD], "unevaluatedProperties": False},
        {("/allOf/0", "patternProperties"), ("", "unevaluatedProperties")},
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_named_where_it_stands(name: str) -> None:
    schema, spots = LEFT_OUT[name]
    assert set(prepare_schema(schema, is_strict=False).not_enforced) == spots
    with pytest.raises(GuideRefused) as refused:
        prepare_schema(schema)
    assert refused.value.keyword


def test_objects_are_not_closed_where_their_patterns_are_left_out() -> None:
    prepared = prepare_schema({**UNREAD, "properties": {"b": INTEGER}}, is_strict=False, closes_objects=True)
    assert takes(prepared, '{"b": 1, "a": 2}')


@pytest.mark.parametrize("name", ["misspelt", "not a type", "absent document", "absent definition", "not a number"])
def test_what_is_malformed_is_refused_even_if_it_is_not_strict(name: str) -> None:
    with pytest.raises(GuideRefused):
        prepare_schema(REFUSED[name][0], is_strict=False)


def test_a_name_has_one_spelling() -> None:
    """Written with an escape a known name would be another one, whose schema does not hold for it."""
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}}
    prepared = prepare_schema(schema)
    assert takes(prepared, '{"a": 1, "b": "x"}') and not takes(prepared, '{"\\u0061": "x"}')


def test_objects_are_closed_where_that_is_asked() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b": {"type": "object"}}}
    prepared = prepare_schema(schema, closes_objects=True)
    assert takes(prepared, '{"a": 1, "b": {"c": 1}}') and not takes(prepared, '{"a": 1, "c": 1}')
    patterned = {**schema, "patternProperties": {"^x": INTEGER}, "required": ["d"]}
    prepared = prepare_schema(patterned, closes_objects=True)
    assert takes(prepared, '{"a": 1, "d": "required", "x": 2}') and not takes(prepared, '{"d": 1, "c": 1}')


HOSTILE: dict[str, Any] = {
    "optional properties": {"type": "object", "properties": {f"p{n}": True for n in range(1000)}},
    "product of properties": {
        "allOf": [{"anyOf": [{"required": [f"{n}a"]}, {"required": [f"{n}b"]}]} for n in range(40)]
    },
    "chain of references": {
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(500)},
        "$ref": "#/$defs/d0",
    },
    "patterns": {"patternProperties": {f"^(a|b){{1,{n}}}c$": True for n in range(1, 200)}},
    "names beside a pattern": {
        "properties": {f"n{n}": True for n in range(3000)},
        "patternProperties": {"^x(a|b){20}$": True},
    },
    "counted properties": {"properties": {f"p{n}": True for n in range(40)}, "minProperties": 20},
    "unique items": {"type": "array", "items": {"enum": list(range(40))}, "uniqueItems": True},
    "contained items": {"contains": {"const": 1}, "minContains": 40},
    "complements": {"allOf": [{"not": {"pattern": f"^a{{{n}}}b"}} for n in range(150)]},
    "multiples": {"type": "integer", "allOf": [{"multipleOf": n} for n in (9973, 9967, 3)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_work_is_bounded(name: str) -> None:
    with pytest.raises(GuideRefused):
        prepare_schema(HOSTILE[name])
