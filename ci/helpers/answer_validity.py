"""Answers drawn from the masks of many schemas: every one that ended by itself must follow its schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from sampled_answers import Draws, answer
from schema_corpus import corpus, read_json, validator
from schema_generator import SchemaGenerator

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.guides.translate import translate
from inflight.runtime.guided.library import GrammarLibrary, GrammarRefused
from inflight.runtime.guided.llguidance_library import LlguidanceLibrary
from inflight.runtime.guided.vocabulary import Vocabulary, load_vocabulary

CHECKPOINT = Path(__file__).resolve().parents[2] / "model_repository" / "llm" / "1" / "checkpoint"


def default_vocabulary() -> Vocabulary:
    """The default model's."""
    return load_vocabulary(CHECKPOINT, json.loads((CHECKPOINT / "config.json").read_text())["vocab_size"])


@dataclass
class Validity:
    """Of the answers to schemas of one kind."""

    schemas: int = 0
    refused: int = 0
    answers: int = 0
    ended: int = 0
    """By themselves."""
    stopped: int = 0
    """By a limit of the library."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Schema and answer."""

    def try_schema(self, schema: Any, library: GrammarLibrary, draws: Draws, count: int) -> None:
        """Draw `count` answers, and validate those that end, formats included."""
        self.schemas += 1
        params = GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(schema))
        try:
            params = msgspec.structs.replace(params, grammar=translate(params).grammar)
            grammar = library.compile(params)
        except (InvalidRequest, GrammarRefused):
            self.refused += 1
            return
        says = validator(schema)
        for _ in range(count):
            drawn = answer(library, grammar, draws)
            self.answers += 1
            self.ended += drawn.has_ended
            self.stopped += bool(drawn.error)
            if drawn.has_ended and not says.is_valid(read_json(drawn.text)):
                self.failures.append((json.dumps(schema), drawn.text))


def made_schemas(vocabulary: Vocabulary, seed: int, num_answers: int, each: int) -> Validity:
    """`num_answers` in all, `each` to a schema of the kinds that people use."""
    generator, library, draws = SchemaGenerator(seed), LlguidanceLibrary(vocabulary), Draws(vocabulary, seed)
    found = Validity()
    while found.answers < num_answers:
        found.try_schema(generator.schema(), library, draws, each)
    return found


def corpus_schemas(vocabulary: Vocabulary, seed: int, each: int) -> Validity:
    """`each` to every schema of the corpus."""
    library, draws, found = LlguidanceLibrary(vocabulary), Draws(vocabulary, seed), Validity()
    for case in corpus():
        found.try_schema(case.schema, library, draws, each)
    return found
