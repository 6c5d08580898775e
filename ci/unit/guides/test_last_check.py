"""The last check of an answer: what it takes for a breach, where it says that is, and what it leaves unjudged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schema_corpus import corpus, texts

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType, Reasoning
from inflight.guides.last_check import Breach, NotChecked, find_breach
from inflight.guides.translate import translate

DRAFT = "http://json-schema.org/draft-{}/schema#"
THOUGHT = Reasoning(opening="<think>", closing="</think>")
CHANNELS = Reasoning(opening="[", closing="]", before_answer="!")
BEGUN = Reasoning(opening="<think>", closing="</think>", is_open=True)


def params(schema: Any, **more: Any) -> GuidedDecodingParams:
    """As a front of llguidance has them."""
    given = GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(schema), **more)
    return GuidedDecodingParams(
        guide_type=GuideType.JSON_SCHEMA, guide=given.guide, grammar=translate(given).grammar, **more
    )


def test_of_every_schema_valid_values_pass_and_invalid_ones_do_not() -> None:
    wrong, count = [], 0
    for case in corpus():
        try:
            guide = params(case.schema)
        except InvalidRequest:
            continue
        for value, is_valid in [*((v, True) for v in case.valid), *((v, False) for v in case.invalid)]:
            count += 1
            if (find_breach(guide, texts(value, case.schema)[0]) is None) != is_valid:
                wrong.append((case.name, value))
    assert wrong == [] and count > 500


@pytest.mark.parametrize(
    ("schema", "text", "breach"),
    [
        ({"properties": {"a/b": {"items": {"maximum": 3}}}}, '{"a/b": [1, 5]}', ("/properties/a~1b/items", "maximum")),
        ({"required": ["a"], "type": "object"}, "{}", ("", "required")),
        ({"$defs": {"a": {"type": "string"}}, "items": {"$ref": "#/$defs/a"}}, "[1]", ("/$defs/a", "type")),
        ({"properties": {"a": False}, "type": "object"}, '{"a": 1}', ("/properties/a", "false")),
        ({"format": "date", "type": "string"}, '"2026-02-30"', ("", "format")),
        ({"type": "object"}, '{"a": 1', ("", "json_schema")),
        ({"type": "object"}, "", ("", "json_schema")),
        ({"type": "number"}, "NaN", ("", "json_schema")),
        ({"type": "integer"}, "1.5", ("", "type")),
    ],
)
def test_a_breach_is_told_by_pointer_and_keyword(schema: Any, text: str, breach: tuple[str, str]) -> None:
    assert find_breach(params(schema), text) == Breach(*breach)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "1.0"),
        ({"type": "integer"}, "9" * 5_000),
        ({"type": "number", "exclusiveMaximum": 1}, "0.99999999999999999999"),
        ({"type": "number", "multipleOf": 0.01}, "1.13"),
        ({"type": "number"}, "1e999"),
    ],
)
def test_numbers_are_what_they_are_written_as(schema: Any, text: str) -> None:
    assert find_breach(params(schema), text) is None


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"$schema": DRAFT.format("07"), "items": [{"type": "integer"}], "type": "array"}, "[1]", '["a"]'),
        ({"$schema": DRAFT.format("04"), "minimum": 1, "exclusiveMinimum": True}, "2", "1"),
        ({"items": [{"type": "integer"}], "type": "array"}, "[1]", '["a"]'),
        ({"minimum": 1, "exclusiveMinimum": True, "type": "integer"}, "2", "1"),
        (
            {"$schema": DRAFT.format("07"), "$ref": "#/definitions/a", "maximum": 1, "definitions": {"a": {}}},
            "2",
            "",
        ),
    ],
)
def test_older_keywords_mean_what_they_mean_in_their_drafts(schema: Any, valid: str, invalid: str) -> None:
    assert find_breach(params(schema), valid) is None
    assert find_breach(params(schema), invalid) is not None


def test_what_is_said_not_to_be_enforced_is_not_held_against_an_answer() -> None:
    loose = params({"type": "string", "pattern": "(?=a)b"}, is_strict=False)
    assert find_breach(loose, '"c"') is None
    assert find_breach(loose, '"c') == Breach("", "json_schema")
    assert find_breach(params({"type": "string"}, is_strict=False), "1") == Breach("", "type")


def test_formats_count_only_where_they_are_enforced() -> None:
    guide = json.dumps({"type": "string", "format": "date"})
    as_xgrammar_has_it = GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=guide)
    assert find_breach(as_xgrammar_has_it, '"soon"') is None
    assert find_breach(as_xgrammar_has_it, "1") == Breach("", "type")


@pytest.mark.parametrize(
    ("reasoning", "text", "follows"),
    [
        (THOUGHT, "<think>1 + 1</think>\n\n2", True),
        (THOUGHT, "2", True),
        (THOUGHT, "<think>2", False),
        (BEGUN, "1 + 1</think> 2", True),
        (BEGUN, "2", False),
        (BEGUN, "2</think>", False),
        (THOUGHT, '<think>2</think>"2"', False),
        (CHANNELS, "[a][b]!2", True),
        (CHANNELS, "[a][b]!x", False),
    ],
)
def test_the_answer_stands_behind_the_thought(reasoning: Reasoning, text: str, follows: bool) -> None:
    number = GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide='{"type": "integer"}', reasoning=reasoning)
    choice = GuidedDecodingParams(guide_type=GuideType.CHOICE, guide='[" 2", "3"]', reasoning=reasoning)
    assert (find_breach(number, text) is None) == follows
    assert (find_breach(choice, text) is None) == follows


@pytest.mark.parametrize(
    ("kind", "guide", "valid", "invalid"),
    [
        (GuideType.JSON, "", '{"a": 1}', "[1]"),
        (GuideType.CHOICE, '["yes", " no"]', " no", "no"),
    ],
)
def test_guides_without_a_schema(kind: GuideType, guide: str, valid: str, invalid: str) -> None:
    given = GuidedDecodingParams(guide_type=kind, guide=guide)
    assert find_breach(given, valid) is None
    assert find_breach(given, invalid) is not None


@pytest.mark.parametrize(
    ("kind", "guide", "text"),
    [
        (GuideType.REGEX, "a", "b"),
        (GuideType.JSON, "", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        (GuideType.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/schema"}', "1"),
    ],
)
def test_without_a_judge_there_is_no_verdict(kind: GuideType, guide: str, text: str) -> None:
    """References that lead out of a schema are never fetched."""
    with pytest.raises(NotChecked):
        find_breach(GuidedDecodingParams(guide_type=kind, guide=guide), text)
