"""What becomes of a schema and of the values that are known for it: taken or refused, which texts its grammar takes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from grammar_acceptance import Acceptance
from llguidance import LLMatcher
from schema_corpus import Case, escaped, texts, with_integers

from inflight.guided_decoding import WhiteSpace
from inflight.guides.lark.expression import Grammar, Json
from inflight.guides.lark.writer import write_lark
from inflight.guides.limits import PARSER_LIMITS
from inflight.guides.refusal import GuideRefused
from inflight.guides.schema import prepare_schema
from inflight.guides.translate import SPACING, byte_tokenizer


@dataclass(frozen=True)
class Judgement:
    refused: GuideRefused | None = None
    """None = the schema was taken, and its values were tried."""
    accepted: tuple[Any, ...] = ()
    """Invalid values that the grammar takes."""
    rejected: tuple[Any, ...] = ()
    """Valid values that it does not."""


def grammar_of(schema: Any) -> str:
    """Of exactly the values that follow the schema: none is left out that the schema merely does not name. Raises
    GuideRefused."""
    prepared = prepare_schema(schema, is_strict=True, closes_objects=False)
    return write_lark(Grammar(Json(prepared.written(SPACING[WhiteSpace.DUMPS]), first=0, further=0)))


def judge(case: Case) -> Judgement:
    """A valid value is taken if one order of its keys is, with its whole numbers as they come or as integers; of an
    invalid one no order may be, and no way to write it."""
    try:
        written_grammar = grammar_of(case.schema)
        _check(written_grammar)
    except GuideRefused as refused:
        return Judgement(refused=refused)
    grammar = Acceptance(written_grammar)
    accepted, rejected = [], []
    for value in case.invalid:
        written = _spellings(value, case.schema)
        if any(map(grammar.takes, (*written, *map(escaped, written)))):
            accepted.append(value)
    for value in case.valid:
        if not any(map(grammar.takes, _spellings(value, case.schema))):
            rejected.append(value)
    return Judgement(accepted=tuple(accepted), rejected=tuple(rejected))


def _spellings(value: Any, schema: Any) -> tuple[str, ...]:
    return *texts(value, schema), *texts(with_integers(value), schema)


def _check(grammar: str) -> None:
    """Refuse what only the library does: such a refusal names no keyword."""
    whole = LLMatcher.grammar_from_lark(grammar)
    message = LLMatcher.validate_grammar(whole, byte_tokenizer(), limits=PARSER_LIMITS)
    if message:
        raise GuideRefused(f"is not taken by the library: {message}")


@dataclass
class Coverage:
    """Of many schemas."""

    schemas: int = 0
    taken: int = 0
    invalid: int = 0
    valid: int = 0
    """Values of schemas that were taken."""
    accepted: list[tuple[str, str]] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Name of the schema, and the value's text."""
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of the schema -> pointer and keyword."""

    def keywords(self) -> dict[str, int]:
        """Keyword -> schemas that were refused for it."""
        return dict(Counter(keyword or "(none)" for _, keyword in self.refused.values()).most_common())


def coverage(cases: Iterable[Case]) -> Coverage:
    found = Coverage()
    for case in cases:
        found.schemas += 1
        judged = judge(case)
        if judged.refused is not None:
            found.refused[case.name] = (judged.refused.pointer, judged.refused.keyword)
            continue
        found.taken += 1
        found.invalid += len(case.invalid)
        found.valid += len(case.valid)
        found.accepted += [(case.name, json.dumps(value)) for value in judged.accepted]
        found.rejected += [(case.name, json.dumps(value)) for value in judged.rejected]
    return found
