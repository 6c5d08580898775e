"""From what a request asks to the grammar that the engine is given: once, where the request arrives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from msgspec import structs

from inflight.guided_decoding import MAX_WHITE_SPACE, GuidedDecodingParams, GuideType, Reasoning, WhiteSpace
from inflight.guides.lark.client_lark import START, read_lark
from inflight.guides.lark.ebnf import read_ebnf
from inflight.guides.lark.expression import (
    NOTHING,
    Characters,
    Either,
    Grammar,
    Json,
    Node,
    Repeat,
    Sequence,
    Text,
    Until,
    Without,
    optional,
)
from inflight.guides.lark.lexemes import first_mask
from inflight.guides.lark.python_regex import read_regex
from inflight.guides.lark.structural_tags import read_structural_tag
from inflight.guides.lark.writer import HEADER, write_lark
from inflight.guides.limits import CHECK_LIMITS, MAX_TRANSLATIONS
from inflight.guides.refusal import GuideRefused
from inflight.guides.schema import prepare_schema

ANY_OBJECT: dict[str, Any] = {"type": "object"}
SPACE = Characters(ranges=((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)))
SPACING: dict[WhiteSpace, dict[str, Any]] = {
    WhiteSpace.DUMPS: {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    WhiteSpace.COMPACT: {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    WhiteSpace.FREE: {"whitespace_flexible": True, "whitespace_pattern": rf"[ \t\n\r]{{0,{MAX_WHITE_SPACE}}}"},
}
FIRST = {"object": "{", "array": "[", "string": '"', "boolean": "tf", "null": "n", "number": "-0123456789"}
"""Characters that a JSON text begins with, by its type."""
NUMBER_GOES_ON = "0123456789.eE+-"
ANY_CHARACTER = sum(1 << ord(character) for character in "\x01aZ0~")
"""What free text may begin with, and no other part of an answer."""


@dataclass(frozen=True)
class Translated:
    grammar: str
    """llguidance's Lark; equal guides give equal ones."""
    not_enforced: tuple[tuple[str, str], ...] = ()
    """JSON pointer and keyword of what a schema says and the grammar does not, if the request is not strict."""


@lru_cache(maxsize=MAX_TRANSLATIONS)
def translate(params: GuidedDecodingParams) -> Translated:
    """Raises InvalidRequest if the guide is outside the bounds, GuideRefused if it cannot be followed exactly."""
    params.validate()
    if any(0xD800 <= ord(character) <= 0xDFFF for character in params.guide):
        raise GuideRefused("has half of a surrogate pair, which no output holds")
    schemas = _Schemas(params)
    try:
        read = _lark if params.guide_type is GuideType.LARK_GRAMMAR else _written
        grammar = read(params, schemas)
    except RecursionError:
        raise GuideRefused("is nested too deeply") from None
    _check(grammar)
    return Translated(grammar, tuple(schemas.not_enforced))


class _Schemas:
    """Of one request: what becomes of each of its schemas."""

    def __init__(self, params: GuidedDecodingParams) -> None:
        self._params = params
        self.not_enforced: list[tuple[str, str]] = []

    def json_value(self, schema: Any, pointer: str = "", *, is_compact: bool = False) -> Json:
        """JSON that follows the schema at `pointer` of the guide."""
        try:
            prepared = prepare_schema(schema, is_strict=self._params.is_strict, closes_objects=True)
        except GuideRefused as refused:
            raise (refused.within(pointer) if pointer else refused) from None
        self.not_enforced += [(pointer + at, keyword) for at, keyword in prepared.not_enforced]
        first, further = _edges(prepared.schema)
        whole = prepared.written(SPACING[WhiteSpace.COMPACT if is_compact else self._params.white_space])
        return Json(whole, first, further)


def _written(params: GuidedDecodingParams, schemas: _Schemas) -> str:
    grammar = _grammar(params, schemas)
    if params.reasoning is not None:
        grammar = Grammar(_behind(params.reasoning, grammar.start), grammar.rules)
    return write_lark(grammar)


def _behind(reasoning: Reasoning, answer: Node) -> Node:
    """The answer behind a thought. Free text that an answer begins with has the white space before it, too. Where a
    thought may be left out, such text without one does not hold the tag that would begin it. If an answer begins with
    free text in another way, it has the thought: what it holds about calls of tools holds within the thought as well.
    """
    is_free = first_mask(answer) & ANY_CHARACTER == ANY_CHARACTER
    if is_free and not reasoning.is_open:
        alone = _without(reasoning.opening, answer)
        begun = _thought(structs.replace(reasoning, is_open=True), with_space=False)
        return answer if alone is None else Either((Sequence((Text(reasoning.opening), begun, answer)), alone))
    return Sequence((_thought(reasoning, with_space=not is_free), answer))


def _without(text: str, answer: Node) -> Node | None:
    """The answer without `text` in the free text that it begins with; None if it does not begin with that alone."""
    if isinstance(answer, Until):
        return Until(answer.mark, answer.stops | {text})
    if isinstance(answer, Without):
        return Without(answer.stops | {text})
    if isinstance(answer, Either):
        ways = [_without(text, part) for part in answer.parts]
        able = tuple(way for way in ways if way is not None)
        return Either(able) if len(able) == len(ways) else None
    if not isinstance(answer, Sequence) or not answer.parts:
        return None
    first, *rest = answer.parts
    if isinstance(first, Repeat) and rest and (first.low, first.high) == (0, None):
        last = rest[0] if len(rest) == 1 else Sequence(tuple(rest))
        return _without(text, Either((Sequence((first.part, *answer.parts)), last)))
    begun = _without(text, first)
    return None if begun is None else Sequence((begun, *rest))


def _grammar(params: GuidedDecodingParams, schemas: _Schemas) -> Grammar:
    kind, guide = params.guide_type, params.guide
    if kind is GuideType.REGEX:
        return Grammar(read_regex(guide))
    if kind is GuideType.EBNF_GRAMMAR:
        return read_ebnf(guide)
    if kind is GuideType.CHOICE:
        return Grammar(Either(tuple(Text(text) for text in dict.fromkeys(json.loads(guide)))))
    if kind is GuideType.STRUCTURAL_TAG:
        return read_structural_tag(json.loads(guide), schemas.json_value)
    schema = json.loads(guide) if kind is GuideType.JSON_SCHEMA else ANY_OBJECT
    return Grammar(schemas.json_value(schema))


def _thought(reasoning: Reasoning, *, with_space: bool = True) -> Node:
    """Any text up to the closing tag, and white space; it may be left out unless it was begun by the prompt."""
    if reasoning.before_answer:
        text = Until(reasoning.closing, frozenset((reasoning.closing, *reasoning.excludes)))
        one = Sequence((Text(reasoning.opening), text, Text(reasoning.behind)))
        return Sequence((Repeat(one), Text(reasoning.before_answer)))
    thought = Sequence(
        (
            NOTHING if reasoning.is_open else Text(reasoning.opening),
            Until(reasoning.closing, frozenset((reasoning.closing,))),
            Repeat(SPACE, 0, MAX_WHITE_SPACE) if with_space else NOTHING,
        )
    )
    return thought if reasoning.is_open else optional(thought)


def _lark(params: GuidedDecodingParams, schemas: _Schemas) -> str:
    if params.reasoning is None:
        return HEADER + read_lark(params.guide, schemas.json_value)
    answer, thought, terminal = (_unused(name, params.guide) for name in ("answer", "thought", "THOUGHT"))
    lines = write_lark(Grammar(_thought(params.reasoning))).removeprefix(HEADER)
    lines = re.sub(rf"\b{START}\b", thought, re.sub(r"\bT(\d+)\b", rf"{terminal}\1", lines))
    return f"{HEADER}{START}: {thought} {answer}\n{lines}{read_lark(params.guide, schemas.json_value, answer)}"


def _unused(name: str, text: str) -> str:
    """A name that does not occur in the text, of rules or terminals as its letters are small or large."""
    while name in text:
        name += name[-1]
    return name


def _edges(schema: Any) -> tuple[int, int]:
    """Characters that a text of the schema may begin with, and those that may continue a whole one."""
    names = list(dict.fromkeys(_types(schema, schema.get("$defs", {}) if isinstance(schema, dict) else {})))
    names = ["number" if name == "integer" else name for name in names]
    first = 0
    for name in names:
        first |= _mask(FIRST.get(name, ""))
    return first, _mask(NUMBER_GOES_ON) if "number" in names else 0


def _types(schema: Any, definitions: dict[str, Any], num_seen: int = 0) -> list[str]:
    """Those of its values; all of them where it does not say."""
    if isinstance(schema, dict) and num_seen <= len(definitions):
        if isinstance(schema.get("$ref"), str):
            return _types(definitions.get(schema["$ref"].rpartition("/")[2]), definitions, num_seen + 1)
        if isinstance(schema.get("anyOf"), list):
            return [name for one in schema["anyOf"] for name in _types(one, definitions, num_seen)]
        kinds = schema.get("type")
        if isinstance(kinds, str):
            return [kinds]
        if isinstance(kinds, list):
            return kinds
    return list(FIRST)


def _mask(characters: str) -> int:
    return sum(1 << ord(character) for character in characters)


class _Bytes:
    """A vocabulary of all single bytes and an end: enough to see that a grammar can be begun."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes((value,)) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _check(grammar: str) -> None:
    """What the library says of it, in words for whoever wrote the guide."""
    matcher = LLMatcher(byte_tokenizer(), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=CHECK_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    message = matcher.get_error()
    if not message:
        return
    lower = message.lower()
    if any(word in lower for word in ("fuel", "limit", "too large", "too big", "too complex", "exceed")):
        raise GuideRefused("needs more work than is allowed for one: make its repetitions or alternatives fewer")
    if "unimplemented keys" in lower or "json schema" in lower:
        raise GuideRefused("has a schema that cannot be followed exactly")
    found = re.search(r"unknown name: \"?([^\"\s]{1,40})", message)
    if found:
        raise GuideRefused(f"uses {found[1]}, which it does not define")
    raise GuideRefused("cannot be followed: it allows no text, or is not in the syntax of its type")
