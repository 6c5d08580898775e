"""Schemas of every keyword and of the kinds that people use, against what is said of their values: by a validator, then
by the grammars that they are translated to."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from guides import guide
from msgspec import structs
from schema_corpus import Case, corpus, official_cases, texts, validator
from schema_judgement import Judgement, judge

from ci.bench.structured_output.made_vocabulary import made_vocabulary
from inflight.guided_decoding import GuideType
from inflight.guides.translate import translate
from inflight.runtime.guided.library import GrammarRefused
from inflight.runtime.guided.llguidance_library import LlguidanceLibrary

REFUSED: dict[str, tuple[str, str]] = {
    "arrays/uniqueItems": ("", "uniqueItems"),
    "combinations/oneOf that overlap": ("/oneOf/1", "multipleOf"),
    "combinations/not of oneOf": ("/not/oneOf/0", "multipleOf"),
    "combinations/oneOf of number and integer": ("", "oneOf"),
    "combinations/not of a format": ("/not", "format"),
    "formats/format idn-email": ("", "format"),
    "formats/format regex": ("", "format"),
    "numbers/multipleOf a large number": ("", "multipleOf"),
    "numbers/multipleOf two large numbers": ("/allOf/0", "multipleOf"),
    "numbers/multiples that people count in": ("", "multipleOf"),
    "objects/patternProperties that overlap in too many ways": ("", "patternProperties"),
    "people/pydantic's constraints": ("/properties/tags", "uniqueItems"),
    "strings/constant with a control character, beside an open object": ("/anyOf/0", "const"),
    "strings/pattern with look-ahead": ("", "pattern"),
    "strings/pattern with look-behind": ("", "pattern"),
    "strings/pattern with a backreference": ("", "pattern"),
    "strings/pattern with a word boundary": ("", "pattern"),
}
"""Schema -> pointer and keyword of why it is refused."""

REJECTED: dict[str, tuple[str, ...]] = {
    "numbers/tiny numbers": (
        "1e-06",
        "5e-06",
    ),  # a number with bounds has no exponent
    "strings/strings with every escape": ('"\\u007f"',),  # written as an escape only
}
"""Schema -> texts of the valid values that its grammar leaves out."""
MAX_REJECTED = 0.01
"""Of the valid values."""


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


@cache
def judged(place: int) -> Judgement:
    return judge(corpus()[place])


@pytest.mark.parametrize("case", corpus(), ids=lambda case: case.name)
def test_what_the_corpus_says_of_a_value_is_what_a_validator_says(case: Case) -> None:
    says = validator(case.schema)
    assert all(map(says.is_valid, case.valid))
    assert not any(map(says.is_valid, case.invalid))


@pytest.mark.parametrize("place", range(len(corpus())), ids=lambda place: corpus()[place].name)
def test_a_schema_is_enforced_exactly_or_refused_by_name(place: int) -> None:
    name, found = corpus()[place].name, judged(place)
    refused = found.refused and (found.refused.pointer, found.refused.keyword)
    assert refused == REFUSED.get(name)
    assert found.accepted == ()
    assert tuple(json.dumps(value) for value in found.rejected) == REJECTED.get(name, ())


def test_what_the_front_takes_the_engine_compiles() -> None:
    """Both count work: the front with few tokens, the engine with a vocabulary of 128,000."""
    library, refused = LlguidanceLibrary(made_vocabulary(seed=0)), {}
    for case in corpus():
        params = guide(GuideType.JSON_SCHEMA, json.dumps(case.schema))
        if case.name not in REFUSED:
            try:
                library.compile(structs.replace(params, grammar=translate(params).grammar))
            except GrammarRefused as error:
                refused[case.name] = str(error)
    assert refused == {}


def test_every_keyword_occurs() -> None:
    text = json.dumps([case.schema for case in corpus()])
    assert [keyword for keyword in KEYWORDS.split() if f'"{keyword}":' not in text] == []


def test_few_valid_values_are_left_out() -> None:
    num_valid = sum(len(case.valid) for case in corpus() if case.name not in REFUSED)
    assert sum(map(len, REJECTED.values())) <= MAX_REJECTED * num_valid


def test_keys_are_written_in_the_order_of_properties() -> None:
    schema = {"allOf": [{"properties": {"c": {}}}], "properties": {"b": {"items": {"required": ["e", "d"]}}, "a": {}}}
    assert texts([{"a": "é", "b": [{"d": 1, "e": 2}], "c": 0}], schema) == (
        '[{"a": "é", "b": [{"d": 1, "e": 2}], "c": 0}]',
        '[{"b": [{"e": 2, "d": 1}], "a": "é", "c": 0}]',
        '[{"c": 0, "b": [{"e": 2, "d": 1}], "a": "é"}]',
    )
    assert texts({"b": 1, "a": 2}, True) == ('{"b": 1, "a": 2}', '{"a": 2, "b": 1}')


def test_a_folder_of_the_official_suites_form_is_read(tmp_path: Path) -> None:
    said = ((1, True, "an integer"), ("x", False, "text"), (None, False, "null"), (2.5, True, "is only an annotation"))
    tests = [{"data": data, "valid": is_valid, "description": what} for data, is_valid, what in said]
    group = {"description": "integers", "schema": {"type": "integer"}, "tests": tests}
    (tmp_path / "optional").mkdir()
    (tmp_path / "optional" / "type.json").write_text(json.dumps([group]))
    (case,) = official_cases(tmp_path)
    assert case == Case("optional/type/0 integers", {"type": "integer"}, (1,), ("x", None))
    assert judge(case) == Judgement()
