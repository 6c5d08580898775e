"""Schemas of every keyword and of the kinds that people use, and what is said of their values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from schema_corpus import Case, corpus, official_cases, texts, validator

KEYWORDS = """
    $schema $id $anchor $dynamicAnchor $ref $dynamicRef $defs $comment
    type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern
    maxItems minItems uniqueItems maxContains minContains maxProperties minProperties required dependentRequired
    prefixItems items contains additionalProperties properties patternProperties dependentSchemas propertyNames
    if then else allOf anyOf oneOf not unevaluatedItems unevaluatedProperties
    format contentEncoding contentMediaType contentSchema
    title description default deprecated readOnly writeOnly examples
"""
"""Of https://json-schema.org/draft/2020-12/schema, but for $vocabulary, which only schemas of schemas have."""


@pytest.mark.parametrize("case", corpus(), ids=lambda case: case.name)
def test_what_the_corpus_says_of_a_value_is_what_a_validator_says(case: Case) -> None:
    says = validator(case.schema)
    assert all(map(says.is_valid, case.valid))
    assert not any(map(says.is_valid, case.invalid))


def test_every_keyword_occurs() -> None:
    text = json.dumps([case.schema for case in corpus()])
    assert [keyword for keyword in KEYWORDS.split() if f'"{keyword}":' not in text] == []


def test_keys_are_written_in_the_order_of_properties() -> None:
    schema = {"allOf": [{"properties": {"c": {}}}], "properties": {"b": {"items": {"required": ["e", "d"]}}, "a": {}}}
    assert texts([{"a": "é", "b": [{"d": 1, "e": 2}], "c": 0}], schema) == (
        '[{"a": "é", "b": [{"d": 1, "e": 2}], "c": 0}]',
        '[{"b": [{"e": 2, "d": 1}], "a": "é", "c": 0}]',
        '[{"c": 0, "b": [{"e": 2, "d": 1}], "a": "é"}]',
    )
    assert texts({"b": 1, "a": 2}, True) == ('{"b": 1, "a": 2}', '{"a": 2, "b": 1}')


def test_a_folder_of_the_official_suites_form_is_read(tmp_path: Path) -> None:
    tests = [{"data": 1, "valid": True}, {"data": "x", "valid": False}, {"data": None, "valid": False}]
    group = {"description": "integers", "schema": {"type": "integer"}, "tests": tests}
    (tmp_path / "optional").mkdir()
    (tmp_path / "optional" / "type.json").write_text(json.dumps([group]))
    (case,) = official_cases(tmp_path)
    assert case == Case("optional/type/0 integers", {"type": "integer"}, (1,), ("x", None))
