"""Guides of bodies: which of them reach the engine and how, what is refused, and what answers say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizer import checking_config
from openai_server import (
    CHAT,
    CHATS,
    COMPLETIONS,
    PlayedEngine,
    Running,
    ask,
    checkpoint_folder,
    complete,
    openai_server,
    say,
    wait_until,
)

from inflight.guided_decoding import GuideType, WhiteSpace

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "type": "tag",
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": {}, "max_whitespace_cnt": 8},
                "end": "</f>",
            }
        ],
    },
}
OLDER_TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    ("body", "kind", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, GuideType.JSON, ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            GuideType.JSON_SCHEMA,
            '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        ),
        ({"response_format": TAGS}, GuideType.STRUCTURAL_TAG, json.dumps(TAGS)),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, GuideType.STRUCTURAL_TAG, json.dumps(TAGS)),
        ({"response_format": OLDER_TAGS}, GuideType.STRUCTURAL_TAG, json.dumps(TAGS)),
        ({"structured_outputs": {"structural_tag": OLDER_TAGS}}, GuideType.STRUCTURAL_TAG, json.dumps(TAGS)),
        ({"structured_outputs": {"regex": "a+"}}, GuideType.REGEX, "a+"),
        ({"structured_outputs": {"json": '{"type":"object"}'}}, GuideType.JSON_SCHEMA, '{"type":"object"}'),
        ({"guided_regex": "a+"}, GuideType.REGEX, "a+"),
        ({"guided_choice": ["yes", 'a "no"']}, GuideType.CHOICE, '["yes", "a \\"no\\""]'),
        ({"guided_grammar": 'root ::= "a"'}, GuideType.EBNF_GRAMMAR, 'root ::= "a"'),
        ({"guided_json": {"type": "object"}}, GuideType.JSON_SCHEMA, '{"type": "object"}'),
    ],
)
def test_grammars_reach_the_engine(running: Running, body: dict[str, Any], kind: GuideType, guide: str) -> None:
    complete(running, **body)
    params = running.engine.sent.guided_decoding_params
    assert params is not None
    assert (params.guide_type, params.guide) == (kind, guide)


LOOSE = {"type": "object", "properties": {"a/b": {"type": "string", "pattern": "(?=x)y"}}}
"""A schema with a keyword that cannot be enforced."""


def format_of(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}}


@pytest.mark.parametrize("strict", [{}, {"strict": True}])
def test_a_schema_that_cannot_be_enforced_is_refused_by_pointer_and_keyword(
    running: Running, strict: dict[str, bool]
) -> None:
    response = running.post(CHATS, {**CHAT, **format_of(LOOSE, **strict)})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "pattern of /properties/a~1b" in error["message"]


def test_what_a_schema_that_is_not_strict_says_in_vain_is_named(running: Running) -> None:
    """In a header, and in the answer: whole, or every chunk of it."""
    told = [{"pointer": "/properties/a~1b", "keyword": "pattern"}]
    whole = running.post(CHATS, {**CHAT, **format_of(LOOSE, strict=False)})
    stream = running.post(CHATS, {**CHAT, **format_of(LOOSE, strict=False), "stream": True})
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert whole.json()["guide_not_enforced"] == told
    assert chunks and all(chunk["guide_not_enforced"] == told for chunk in chunks)
    for response in (whole, stream):
        assert response.headers["inflight-guide-not-enforced"] == "#/properties/a~1b pattern"


@pytest.mark.parametrize("schema", [SCHEMA, {"type": "object"}])
def test_a_schema_that_is_enforced_has_nothing_to_tell(running: Running, schema: dict[str, Any]) -> None:
    response = running.post(CHATS, {**CHAT, **format_of(schema, strict=False)})
    assert "guide_not_enforced" not in response.json() and "inflight-guide-not-enforced" not in response.headers


ANYTHING = {"json": {"type": "object"}}


@pytest.mark.parametrize(
    ("body", "white_space"),
    [
        ({"structured_outputs": {**ANYTHING, "disable_any_whitespace": True}}, WhiteSpace.COMPACT),
        ({"structured_outputs": {**ANYTHING, "whitespace_pattern": "[ ]?"}}, WhiteSpace.DUMPS),
        ({"guided_json": {"type": "object"}, "guided_whitespace_pattern": r"\s*"}, WhiteSpace.FREE),
        ({**format_of({"type": "object"}), "guided_white_space": "free"}, WhiteSpace.FREE),
        ({"guided_json_object": True, "guided_white_space": "free"}, WhiteSpace.FREE),
    ],
)
def test_white_space_of_json_is_the_clients_choice(
    running: Running, body: dict[str, Any], white_space: WhiteSpace
) -> None:
    complete(running, **body, guided_decoding_backend="guidance")
    params = running.engine.sent.guided_decoding_params
    assert params is not None and params.white_space is white_space


def test_vllms_fields_may_leave_out_what_is_not_enforced(running: Running) -> None:
    unenforced = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    outputs = {"json": unenforced, "strict": False, "disable_additional_properties": True, "backend": "llguidance"}
    response = running.post(COMPLETIONS, {"prompt": "ab", "structured_outputs": outputs})
    assert response.json()["guide_not_enforced"] == [{"pointer": "", "keyword": "uniqueItems"}]


@pytest.mark.parametrize(
    ("grammar", "kind"), [("root ::= [ab]+", GuideType.EBNF_GRAMMAR), ("start: /[ab]+/", GuideType.LARK_GRAMMAR)]
)
def test_a_grammar_is_known_by_how_it_defines_a_rule(running: Running, grammar: str, kind: GuideType) -> None:
    complete(running, guided_grammar=grammar)
    params = running.engine.sent.guided_decoding_params
    assert params is not None and params.guide_type is kind


def test_a_format_of_text_is_none(running: Running) -> None:
    ask(running, response_format={"type": "text"})
    assert running.engine.sent.guided_decoding_params is None


def test_guided_answers_are_checked_if_the_operator_wants_that(tmp_path: Path) -> None:
    """What breaks its guide is counted, and answered as it is, whole or streamed. What was cut is not held to it."""
    folder = checkpoint_folder(tmp_path)
    engine = PlayedEngine(say('{"a": 1}'), config=checking_config(folder))
    with openai_server(engine, folder) as url:
        running, guided = Running(url, engine), format_of(SCHEMA)

        def shows(num_checked: int, num_failed: int) -> bool:
            text = running.get("/metrics").text
            wanted = {"checked": num_checked, "failed": num_failed}
            return all(
                f'inflight_guided_answers_{name}_total{{model="llm"}} {n}.0' in text for name, n in wanted.items()
            )

        ask(running, n=2, **guided)
        wait_until(lambda: shows(2, 0))
        engine.script = say(wrong := '{"a": "x"}')
        assert ask(running, **guided)["message"]["content"] == wrong
        wait_until(lambda: shows(3, 1))
        *chunks, _ = running.events(CHATS, {**CHAT, **guided})
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == wrong
        wait_until(lambda: shows(4, 2))
        assert ask(running, max_tokens=3, **guided)["finish_reason"] == "length"
        ask(running, **guided)
        wait_until(lambda: shows(5, 3))
