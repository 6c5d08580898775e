"""What the output must follow: response_format, structured_outputs and guided_* as one grammar of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.openai.api_error import invalid, unsupported
from inflight.openai.fields import Body, ResponseFormat

Found = tuple[str, GuidedDecodingParams]
"""The field that says so, and the grammar."""


def read_guide(body: Body, forced_calls: GuidedDecodingParams | None = None) -> GuidedDecodingParams | None:
    """`forced_calls`: the grammar of tool_choice. Raises APIError if fields contradict each other, or ask for what
    XGrammar is not told here."""
    found: list[Found] = [*_of_response_format(body.response_format), *_of_structured_outputs(body), *_of_guided(body)]
    if forced_calls is not None:
        found.append(("tool_choice", forced_calls))
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(f"{first} and {second} are two grammars for one output: give one of them", second)
    return found[0][1] if found else None


def _of_response_format(given: dict[str, Any] | None) -> Iterator[Found]:
    if given is None:
        return
    try:
        form = msgspec.convert(given, ResponseFormat)
    except msgspec.ValidationError as error:
        raise invalid(f"response_format: {error}", "response_format") from None
    if form.type == "json_object":
        yield "response_format", _any_object()
    elif form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema is None:
            raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
        yield "response_format", _schema(form.json_schema.schema)
    elif form.type == "structural_tag":
        yield "response_format", GuidedDecodingParams(guide_type=GuideType.STRUCTURAL_TAG, guide=json.dumps(given))
    elif form.type != "text":
        known = "text, json_object, json_schema or structural_tag"
        raise invalid(f"response_format.type must be {known}", "response_format")


def _of_structured_outputs(body: Body) -> Iterator[Found]:
    given = body.structured_outputs
    if given is None:
        return
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name):
            raise unsupported(f"structured_outputs.{name}", "the grammar of JSON is XGrammar's own")
    where = "structured_outputs."
    if given.json is not None:
        yield f"{where}json", _schema(given.json)
    if given.json_object:
        yield f"{where}json_object", _any_object()
    if given.structural_tag is not None:
        tag = given.structural_tag
        text = tag if isinstance(tag, str) else json.dumps(tag)
        yield f"{where}structural_tag", GuidedDecodingParams(guide_type=GuideType.STRUCTURAL_TAG, guide=text)
    yield from _of_texts(where, given.regex, given.choice, given.grammar)


def _of_guided(body: Body) -> Iterator[Found]:
    where = "guided_"
    if body.guided_json is not None:
        yield f"{where}json", _schema(body.guided_json)
    if body.guided_json_object:
        yield f"{where}json_object", _any_object()
    yield from _of_texts(where, body.guided_regex, body.guided_choice, body.guided_grammar)


def _of_texts(where: str, regex: str | None, choice: list[str] | None, grammar: str | None) -> Iterator[Found]:
    if regex is not None:
        yield f"{where}regex", GuidedDecodingParams(guide_type=GuideType.REGEX, guide=regex)
    if choice is not None:
        if not choice or not all(choice):
            raise invalid(f"{where}choice must be a list of texts that are not empty", f"{where}choice")
        literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
        yield f"{where}choice", GuidedDecodingParams(guide_type=GuideType.EBNF_GRAMMAR, guide=f"root ::= {literals}")
    if grammar is not None:
        yield f"{where}grammar", GuidedDecodingParams(guide_type=GuideType.EBNF_GRAMMAR, guide=grammar)


def _any_object() -> GuidedDecodingParams:
    return GuidedDecodingParams(guide_type=GuideType.JSON)


def _schema(schema: str | dict[str, Any]) -> GuidedDecodingParams:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=text)
