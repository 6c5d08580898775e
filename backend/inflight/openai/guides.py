"""What the output must follow: response_format, structured_outputs and guided_* as one grammar of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from inflight.guided_decoding import (
    NO_SUCH_SPACE,
    GuidedDecodingBackend,
    GuidedDecodingParams,
    GuideType,
    WhiteSpace,
    grammar_type,
    white_space_of,
)
from inflight.openai.api_error import invalid, unsupported
from inflight.openai.fields import Body, ResponseFormat, TriggeredStructures
from inflight.openai.tools.forms import Form, schema_of, tag

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")

OF_CALLS = ("tool_choice", "tools")
"""The fields that a grammar of calls is from."""

Found = tuple[str, GuidedDecodingParams]
"""The field that says so, and the grammar."""


def read_guide(body: Body, calls: GuidedDecodingParams | None = None, *, is_forced: bool = True) -> Found | None:
    """None if the output follows no grammar. `calls`: that of tool calls; unless `is_forced`, also that of the answer
    in their place. Raises APIError if fields contradict each other, or ask for what no grammar here does."""
    found: list[Found] = [*_of_structured_outputs(body), *_of_guided(body)]
    if calls is None or is_forced or answer_form(body.response_format) is None:
        found = [*_of_response_format(body.response_format), *found]
    if calls is not None:
        found.append((OF_CALLS[not is_forced], calls))
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(f"{first} and {second} are two grammars for one output: give one of them", second)
    asked = _white_space(body)
    if not found:
        if asked is not None:
            raise invalid(f"{asked[0]} says how JSON is written, and no field asks for any", asked[0])
        return None
    field, params = found[0]
    return field, params if asked is None else structs.replace(params, white_space=asked[1])


def _white_space(body: Body) -> tuple[str, WhiteSpace] | None:
    """The field that says what stands between the parts of JSON, and what does."""
    outputs = body.structured_outputs
    patterns = {"guided_whitespace_pattern": body.guided_whitespace_pattern}
    asked: list[tuple[str, WhiteSpace]] = []
    if outputs is not None:
        patterns["structured_outputs.whitespace_pattern"] = outputs.whitespace_pattern
        if outputs.disable_any_whitespace:
            asked.append(("structured_outputs.disable_any_whitespace", WhiteSpace.COMPACT))
    for field, pattern in patterns.items():
        if pattern:
            white_space = white_space_of(pattern)
            if white_space is None:
                raise unsupported(field, NO_SUCH_SPACE)
            asked.append((field, white_space))
    if body.guided_white_space is not None:
        try:
            asked.append(("guided_white_space", WhiteSpace(body.guided_white_space)))
        except ValueError:
            known = ", ".join(each.value for each in WhiteSpace)
            raise invalid(f"guided_white_space must be one of {known}", "guided_white_space") from None
    if len(asked) > 1:
        sentence = f"{asked[0][0]} and {asked[1][0]} both say what stands between the parts of JSON: give one of them"
        raise invalid(sentence, asked[1][0])
    return asked[0] if asked else None


def check_backend(body: Body, backend: GuidedDecodingBackend) -> None:
    """Raise APIError if the request wants another library to follow its guide than the engine's."""
    asked = {"guided_decoding_backend": body.guided_decoding_backend}
    if body.structured_outputs is not None:
        asked["structured_outputs.backend"] = body.structured_outputs.backend
    for field, name in asked.items():
        if not backend.is_meant_by(name or ""):
            raise unsupported(field, f"the engine's configuration chooses it for all requests: {backend.value}")


def answer_form(given: dict[str, Any] | None) -> Form | None:
    """What `response_format` says of an answer as a part of tags; None if it is free, or tags of its own."""
    if given is None:
        return None
    form = _read_response_format(given)
    if form.type not in ("json_object", "json_schema"):
        return None
    return schema_of({"type": "object", "additionalProperties": True} if form.type == "json_object" else _own(form))


def _of_response_format(given: dict[str, Any] | None) -> Iterator[Found]:
    if given is None:
        return
    form = _read_response_format(given)
    if form.type == "json_object":
        yield "response_format", _any_object()
    elif form.type == "json_schema":
        is_strict = form.json_schema is None or form.json_schema.strict is not False
        yield "response_format", _schema(_own(form), is_strict=is_strict)
    elif form.type == "structural_tag":
        yield "response_format", _tags(given, "response_format")


def _read_response_format(given: dict[str, Any]) -> ResponseFormat:
    try:
        form = msgspec.convert(given, ResponseFormat)
    except msgspec.ValidationError as error:
        raise invalid(f"response_format: {error}", "response_format") from None
    if form.type not in RESPONSE_FORMATS:
        *others, last = RESPONSE_FORMATS
        raise invalid(f"response_format.type must be {', '.join(others)} or {last}", "response_format")
    return form


def _own(form: ResponseFormat) -> dict[str, Any]:
    """The schema of type json_schema."""
    if form.json_schema is None or form.json_schema.schema is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", "response_format")
    return form.json_schema.schema


def _tags(given: str | dict[str, Any], field: str) -> GuidedDecodingParams:
    """XGrammar's description of tags, or the older form that vLLM takes as well: `structures` and their `triggers`."""
    if isinstance(given, dict) and "structures" in given:
        try:
            older = msgspec.convert(given, TriggeredStructures)
        except msgspec.ValidationError as error:
            raise invalid(f"{field}: {error}", field) from None
        tags = [tag(each.begin, schema_of(each.schema), each.end) for each in older.structures]
        free = {"type": "triggered_tags", "triggers": older.triggers, "tags": tags}
        given = {"type": "structural_tag", "format": free}
    text = given if isinstance(given, str) else json.dumps(given)
    return GuidedDecodingParams(guide_type=GuideType.STRUCTURAL_TAG, guide=text)


def _of_structured_outputs(body: Body) -> Iterator[Found]:
    given = body.structured_outputs
    if given is None:
        return
    where, is_strict = "structured_outputs.", given.strict is not False
    if given.json is not None:
        yield f"{where}json", _schema(given.json, is_strict=is_strict)
    if given.json_object:
        yield f"{where}json_object", _any_object()
    if given.structural_tag is not None:
        tags = _tags(given.structural_tag, f"{where}structural_tag")
        yield f"{where}structural_tag", structs.replace(tags, is_strict=is_strict)
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
        yield f"{where}choice", GuidedDecodingParams(guide_type=GuideType.CHOICE, guide=json.dumps(choice))
    if grammar is not None:
        yield f"{where}grammar", GuidedDecodingParams(guide_type=grammar_type(grammar), guide=grammar)


def _any_object() -> GuidedDecodingParams:
    return GuidedDecodingParams(guide_type=GuideType.JSON)


def _schema(schema: str | dict[str, Any], *, is_strict: bool = True) -> GuidedDecodingParams:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=text, is_strict=is_strict)
