"""Bounds of what a client may send as a grammar, checked before anything parses it."""

from __future__ import annotations

import json

import pytest

from inflight.errors import InvalidRequest
from inflight.guided_decoding import (
    MAX_GUIDE_BYTES,
    MAX_JSON_GUIDE_BYTES,
    MAX_NESTING,
    GuidedDecodingParams,
    GuideType,
    Reasoning,
    WhiteSpace,
    grammar_type,
    white_space_of,
)
from inflight.request import Request
from inflight.request_limits import RequestLimits

LIMITS = RequestLimits(vocab_size=100, max_seq_len=64, max_input_len=63, kv_cache_tokens=1000)


def params(guide_type: str, guide: str = "") -> GuidedDecodingParams:
    return GuidedDecodingParams(guide_type=GuideType(guide_type), guide=guide)


@pytest.mark.parametrize(
    ("guide_type", "guide"),
    [
        ("json", ""),
        ("json_schema", '{"type": "object"}'),
        ("json_schema", json.dumps({"const": "[" * 100})),
        ("json_schema", "[" * 0 + '{"a":' * (MAX_NESTING - 1) + "{}" + "}" * (MAX_NESTING - 1)),
        ("regex", r"[(((]\(\(" + "(" * MAX_NESTING + "a" + ")" * MAX_NESTING),
        ("regex", "a" * MAX_GUIDE_BYTES),
        ("json_schema", json.dumps({"const": "a" * MAX_GUIDE_BYTES})),
        ("choice", '["a", "[[["]'),
        ("lark_grammar", 'start: "((("'),
        ("ebnf_grammar", 'root ::= "' + "(" * 100 + '"'),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}'),
    ],
)
def test_what_is_within_the_bounds_passes(guide_type: str, guide: str) -> None:
    params(guide_type, guide).validate()


@pytest.mark.parametrize(
    ("guide_type", "guide", "words"),
    [
        ("json", "{}", "takes no guide"),
        ("regex", "", "needs a guide"),
        ("regex", "a" * (MAX_GUIDE_BYTES + 1), "8193 bytes, more than 8192"),
        ("json_schema", json.dumps({"const": "a" * MAX_JSON_GUIDE_BYTES}), "bytes, more than 65536"),
        ("regex", "ä" * MAX_GUIDE_BYTES, "16384 bytes, more than 8192"),
        ("regex", "(" * 33 + ")" * 33, "nested 33 levels deep, more than 32"),
        ("ebnf_grammar", "root ::= " + "(" * 4000, "levels deep"),
        ("json_schema", "[" * 8000, "levels deep"),
        ("json_schema", '{"type": ', "not valid JSON"),
        ("json_schema", "[]", "must be a JSON object"),
        ("structural_tag", "7", "must be a JSON object"),
        ("choice", "[]", "a JSON list of texts that are not empty"),
        ("choice", '["a", ""]', "a JSON list of texts that are not empty"),
        ("choice", '{"a": "b"}', "a JSON list of texts that are not empty"),
        ("choice", '["a", 1]', "a JSON list of texts that are not empty"),
        ("regex", "a\0b", "null character"),
    ],
)
def test_what_is_outside_is_refused_in_a_sentence(guide_type: str, guide: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        params(guide_type, guide).validate()


@pytest.mark.parametrize(("opening", "closing"), [("", "b"), ("a", "")])
def test_a_reasoning_has_two_tags(opening: str, closing: str) -> None:
    reasoning = Reasoning(opening=opening, closing=closing)
    with pytest.raises(InvalidRequest, match="needs an opening and a closing tag"):
        GuidedDecodingParams(guide_type=GuideType.JSON, reasoning=reasoning).validate()


def test_a_request_with_a_grammar_needs_an_end_token() -> None:
    request = Request(request_id=1, input_token_ids=[1], max_tokens=5, guided_decoding_params=params("json"))
    with pytest.raises(InvalidRequest, match="needs an end token"):
        LIMITS.validate(request)


@pytest.mark.parametrize(
    ("pattern", "white_space"),
    [
        ("[ ]?", WhiteSpace.DUMPS),
        (" *", WhiteSpace.DUMPS),
        (r"[\n\t ]*", WhiteSpace.DUMPS),
        (r"\s{0,3}", WhiteSpace.DUMPS),
        (r"\s*", WhiteSpace.FREE),
        ("[ \t\n\r]{0,8}", WhiteSpace.FREE),
        (r"[\n]*", WhiteSpace.COMPACT),
        (" {0,0}", WhiteSpace.COMPACT),
        (" ", None),
        (r"\s+", None),
        ("[ ]{1,}", None),
        ("[a ]*", None),
        (r"( |\n)*", None),
        (" {0,99999}", None),
    ],
)
def test_a_pattern_of_white_space_is_the_freest_kind_within_it(pattern: str, white_space: WhiteSpace | None) -> None:
    assert white_space_of(pattern) is white_space


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"',
        'start ::= "a"\nroot ::= start',
        'root ::=\n  start ": " item\nstart ::= "x"\nitem ::= "y"',
        'root # is defined\n  # below\n  ::= "a" |\n  start-tag "b: c"\nstart-tag ::= "<"',
        'root = "a"',
        "",
    ],
)
def test_rules_of_ebnf(grammar: str) -> None:
    assert grammar_type(grammar) is GuideType.EBNF_GRAMMAR


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"',
        '  ?start : "a"',
        '// root ::= "a"\n# b ::= c\n%import common.INT\nstart: INT',
        'x[capture]: "::="\n  | "::= "\nstart[lazy]: x',
    ],
)
def test_rules_of_lark(grammar: str) -> None:
    assert grammar_type(grammar) is GuideType.LARK_GRAMMAR
