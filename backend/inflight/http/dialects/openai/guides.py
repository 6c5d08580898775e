"""What the output must follow: response_format, structured_outputs and guided_* as one grammar of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from inflight.asking.guide import Guide, object_guide, schema_guide, schema_params
from inflight.asking.refusal import Words
from inflight.asking.tools.forms import schema_of, tag
from inflight.guided_decoding import (
    NO_SUCH_SPACE,
    GuidedDecodingBackend,
    GuidedDecodingParams,
    GuideType,
    WhiteSpace,
    grammar_type,
    white_space_of,
)
from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.openai.fields import Body, ResponseFormat, StructuredOutputs, TextBody, TriggeredStructures

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


class Found(NamedTuple):
    field: str
    """Of the body, that asks for it."""
    guide: Guide


def read_guide(body: TextBody, answer: Found | None) -> tuple[Guide | None, WhiteSpace | None, Words]:
    """The grammar of the answer, what stands between the parts of its JSON, and the fields that say so. `answer`: what
    the body says of the form of the answer. Raises APIError if fields contradict each other, or ask for what no grammar
    here does."""
    found = [] if answer is None else [answer]
    found += [Found(field, Guide(params=params)) for field, params in _of_structured_outputs(body.structured_outputs)]
    if isinstance(body, Body):
        found += [Found(field, Guide(params=params)) for field, params in _of_guided(body)]
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise invalid(f"{first} and {second} are two grammars for one output: give one of them", second)
    asked = _white_space(body)
    words = {"guide": found[0].field} if found else {}
    if asked is None:
        return found[0].guide if found else None, None, words
    return found[0].guide if found else None, asked[1], {**words, "white_space": asked[0]}


def _white_space(body: TextBody) -> tuple[str, WhiteSpace] | None:
    """The field that says what stands between the parts of JSON, and what does."""
    outputs = body.structured_outputs
    patterns: dict[str, str | None] = {}
    asked: list[tuple[str, WhiteSpace]] = []
    if isinstance(body, Body):
        patterns["guided_whitespace_pattern"] = body.guided_whitespace_pattern
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
    if isinstance(body, Body) and body.guided_white_space is not None:
        try:
            asked.append(("guided_white_space", WhiteSpace(body.guided_white_space)))
        except ValueError:
            known = ", ".join(each.value for each in WhiteSpace)
            raise invalid(f"guided_white_space must be one of {known}", "guided_white_space") from None
    if len(asked) > 1:
        sentence = f"{asked[0][0]} and {asked[1][0]} both say what stands between the parts of JSON: give one of them"
        raise invalid(sentence, asked[1][0])
    return asked[0] if asked else None


def check_backend(body: TextBody, backend: GuidedDecodingBackend) -> None:
    """Raise APIError if the request wants another library to follow its guide than the engine's."""
    asked = {"guided_decoding_backend": body.guided_decoding_backend} if isinstance(body, Body) else {}
    if body.structured_outputs is not None:
        asked["structured_outputs.backend"] = body.structured_outputs.backend
    for field, name in asked.items():
        if not backend.is_meant_by(name or ""):
            raise unsupported(field, f"the engine's configuration chooses it for all requests: {backend.value}")


def read_response_format(given: dict[str, Any] | None) -> Found | None:
    """Raises APIError."""
    if given is None:
        return None
    form, field = _read_response_format(given), "response_format"
    if form.type == "structural_tag":
        return Found(field, Guide(params=_tags(given, field)))
    if form.type == "json_object":
        return Found(field, object_guide())
    if form.type == "text":
        return None
    own = form.json_schema
    if own is None or own.schema is None:
        raise invalid("response_format of type json_schema needs json_schema.schema", field)
    return Found(field, schema_guide(own.schema, is_strict=own.strict is not False))


def _read_response_format(given: dict[str, Any]) -> ResponseFormat:
    try:
        form = msgspec.convert(given, ResponseFormat)
    except msgspec.ValidationError as error:
        raise invalid(f"response_format: {error}", "response_format") from None
    if form.type not in RESPONSE_FORMATS:
        *others, last = RESPONSE_FORMATS
        raise invalid(f"response_format.type must be {', '.join(others)} or {last}", "response_format")
    return form


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


def _of_structured_outputs(given: StructuredOutputs | None) -> Iterator[tuple[str, GuidedDecodingParams]]:
    if given is None:
        return
    where, is_strict = "structured_outputs.", given.strict is not False
    if given.json is not None:
        yield f"{where}json", schema_params(given.json, is_strict=is_strict)
    if given.json_object:
        yield f"{where}json_object", GuidedDecodingParams(guide_type=GuideType.JSON)
    if given.structural_tag is not None:
        tags = _tags(given.structural_tag, f"{where}structural_tag")
        yield f"{where}structural_tag", structs.replace(tags, is_strict=is_strict)
    yield from _of_texts(where, given.regex, given.choice, given.grammar)


def _of_guided(body: Body) -> Iterator[tuple[str, GuidedDecodingParams]]:
    where = "guided_"
    if body.guided_json is not None:
        yield f"{where}json", schema_params(body.guided_json)
    if body.guided_json_object:
        yield f"{where}json_object", GuidedDecodingParams(guide_type=GuideType.JSON)
    yield from _of_texts(where, body.guided_regex, body.guided_choice, body.guided_grammar)


def _of_texts(
    where: str, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, GuidedDecodingParams]]:
    if regex is not None:
        yield f"{where}regex", GuidedDecodingParams(guide_type=GuideType.REGEX, guide=regex)
    if choice is not None:
        if not choice or not all(choice):
            raise invalid(f"{where}choice must be a list of texts that are not empty", f"{where}choice")
        yield f"{where}choice", GuidedDecodingParams(guide_type=GuideType.CHOICE, guide=json.dumps(choice))
    if grammar is not None:
        yield f"{where}grammar", GuidedDecodingParams(guide_type=grammar_type(grammar), guide=grammar)
