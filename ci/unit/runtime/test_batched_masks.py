"""Masks of many outputs at once: whatever makes them cheaper, each is the one that its output gets alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from answer_validity import default_vocabulary
from guides import GUIDES, guide
from msgspec import structs
from sampled_answers import Draws

from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.guides.translate import translate
from inflight.runtime.guided import llguidance_library
from inflight.runtime.guided.library import Words
from inflight.runtime.guided.llguidance_library import TOO_COMPLEX, LlguidanceLibrary, LlguidanceState

VOCABULARY = default_vocabulary()
STEPS = 25
STRINGS = (
    {"type": "string", "maxLength": 14},
    {"type": "string", "pattern": "^<.+>$"},
    {"type": "string", "pattern": "^[a-z]+ [A-Z]{3,9}$"},
    {"type": "object", "properties": {"name": {"type": "string", "minLength": 3}, "host": {"format": "hostname"}}},
    {"type": "array", "items": {"type": "string"}},
)
PARAMS = [
    *(params for params, _ in GUIDES.values()),
    *(guide(GuideType.JSON_SCHEMA, json.dumps(schema)) for schema in STRINGS),
]


def rows(count: int) -> Words:
    return np.zeros((count, -(-len(VOCABULARY.texts) // 32)), dtype=np.uint32)


def translated(params: GuidedDecodingParams) -> GuidedDecodingParams:
    return structs.replace(params, grammar=translate(params).grammar)


def test_masks_are_those_of_each_output_alone_and_of_each_token_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some outputs take in the same tokens, others of the same grammar do not."""
    library, alone = LlguidanceLibrary(VOCABULARY), LlguidanceLibrary(VOCABULARY)
    grammars = [library.compile(translated(params)) for params in PARAMS]
    monkeypatch.setattr(llguidance_library, "SLICES", [])
    plain = [alone.compile(translated(params)) for params in PARAMS]
    states = [grammar.start() for grammar in grammars for _ in range(3)]
    twins = [grammar.start() for grammar in plain for _ in range(3)]
    words, word, draws = rows(len(states)), rows(1), Draws(VOCABULARY, seed=3)
    for step in range(STEPS):
        found = library.fill(states, words)
        tokens = [draws.token(row, step) for row in words]
        for place, (state, twin) in enumerate(zip(states, twins, strict=True)):
            assert alone.fill([twin], word) == [found[place]]
            assert np.array_equal(word[0], words[place])
            # The first two of three go together until one of them may go elsewhere.
            token = tokens[place - 1] if place % 3 == 1 and step < STEPS // 2 else tokens[place]
            if token is not None:
                assert state.accept(token) and twin.accept(token)


def test_outputs_that_meet_a_limit_together_are_both_told(monkeypatch: pytest.MonkeyPatch) -> None:
    library = LlguidanceLibrary(VOCABULARY)
    heavy, light = (library.compile(translated(params)) for params in PARAMS[:2])
    states = [heavy.start(), light.start(), heavy.start()]
    monkeypatch.setattr(LlguidanceState, "has_failed", property(lambda state: state.grammar is heavy))
    errors = [error for _, error in library.fill(states, rows(len(states)))]
    assert errors == [TOO_COMPLEX, "", TOO_COMPLEX]


def test_a_grammar_that_is_compiled_meanwhile_changes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread compiles, which may come between the library's work and the reading of what it has written."""
    library = LlguidanceLibrary(VOCABULARY)
    digits, letters = (translated(guide(GuideType.REGEX, pattern)) for pattern in ("[0-9]{4}", "[a-z]{4}"))
    state, words, expected = library.compile(digits).start(), rows(1), rows(1)
    library.fill([state], expected)
    find, compiled = library._fill, []

    def find_and_compile(*arguments: Any) -> None:
        find(*arguments)
        if not compiled:
            compiled.append(letters)
            library.compile(letters)

    monkeypatch.setattr(library, "_fill", find_and_compile)
    library.fill([state], words)
    assert compiled and np.array_equal(words, expected)
