"""Grammars by XGrammar, for who chooses it (`guided_decoding_backend`): it takes more schemas, and drops in silence
what it cannot express. It bounds neither time nor memory: an operator chooses it for clients who are trusted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from inflight.guided_decoding import MAX_WHITE_SPACE, GuidedDecodingParams, GuideType, Reasoning, WhiteSpace
from inflight.runtime.guided.library import Compiled, GrammarRefused, State, Words
from inflight.runtime.guided.vocabulary import Vocabulary

ANY_OBJECT = '{"type": "object"}'


class XgrammarLibrary:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compilers: dict[tuple[int, ...], xgrammar.GrammarCompiler] = {}  # by the special tokens that are shown

    def compile(self, params: GuidedDecodingParams) -> Compiled:
        shown = tuple(sorted(set(params.shown_token_ids)))
        compiler = self._compilers.get(shown)
        if compiler is None:
            compiler = self._compilers[shown] = _compiler_of(self._vocabulary.showing(shown))
        try:
            grammar = _grammar(params)
            if params.reasoning is not None:
                grammar = xgrammar.Grammar.concat(_free(params.reasoning), grammar)
            return XgrammarGrammar(compiler.compile_grammar(grammar))
        except Exception:
            # The library's own words may quote the guide, and speak of its inner parts.
            raise GrammarRefused(f"the guide of type {params.guide_type.value} cannot be compiled") from None

    def fill(self, states: Sequence[State], words: Words) -> list[tuple[bool, str]]:
        found = []
        table = words.view(np.int32)
        for place, state in enumerate(states):
            assert isinstance(state, XgrammarState)
            state.matcher.fill_next_token_bitmask(table, place)
            for stop_id in state.matcher.stop_token_ids:  # the library's own
                words[place, stop_id // 32] &= ~np.uint32(1 << stop_id % 32)
            found.append((bool(state.matcher.is_completed()), ""))
        return found


class XgrammarGrammar:
    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def start(self) -> State:
        return XgrammarState(xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=False))


class XgrammarState:
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self.matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def forced_text(self) -> str:
        try:
            return str(self.matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # it ends within a character
            return ""


def _compiler_of(vocabulary: Vocabulary) -> xgrammar.GrammarCompiler:
    # The library wants an end token, and takes tokens without text for such; each output brings those of its request.
    special = [token_id for token_id, text in enumerate(vocabulary.texts) if not text]
    info = xgrammar.TokenizerInfo(
        list(vocabulary.texts),
        xgrammar.VocabType.RAW,
        vocab_size=len(vocabulary.texts),
        stop_token_ids=special[:1],
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _grammar(params: GuidedDecodingParams) -> xgrammar.Grammar:
    """What the answer follows."""
    make = xgrammar.Grammar
    spacing: dict[str, Any] = {"max_whitespace_cnt": MAX_WHITE_SPACE}
    if params.white_space is WhiteSpace.COMPACT:
        spacing = {"any_whitespace": False, "separators": (",", ":")}
    if params.guide_type is GuideType.JSON:
        return make.from_json_schema(ANY_OBJECT, strict_mode=False, **spacing)
    if params.guide_type is GuideType.JSON_SCHEMA:
        return make.from_json_schema(params.guide, **spacing)
    if params.guide_type is GuideType.REGEX:
        return make.from_regex(params.guide)
    if params.guide_type is GuideType.EBNF_GRAMMAR:
        return make.from_ebnf(params.guide)
    if params.guide_type is GuideType.STRUCTURAL_TAG:
        return make.from_structural_tag(params.guide)
    raise GrammarRefused(f"guides of type {params.guide_type.value} need guided_decoding_backend llguidance")


def _free(reasoning: Reasoning) -> xgrammar.Grammar:
    """Any text up to the closing tag, and whitespace; it may be left out unless it was begun by the prompt."""
    begin = "" if reasoning.is_open else reasoning.opening
    free = {"type": "any_text", "excludes": list(reasoning.excludes)}
    thought = {"type": "tag", "begin": begin, "content": free, "end": reasoning.closing}
    if reasoning.before_answer:
        behind, before = (
            {"type": "const_string", "value": text} for text in (reasoning.behind, reasoning.before_answer)
        )
        several = {"type": "star", "content": {"type": "sequence", "elements": [thought, behind]}}
        form: dict[str, object] = {"type": "sequence", "elements": [several, before]}
    else:
        space = {"type": "regex", "pattern": rf"[ \t\n\r]{{0,{MAX_WHITE_SPACE}}}"}
        whole: dict[str, object] = {"type": "sequence", "elements": [thought, space]}
        form = whole if reasoning.is_open else {"type": "optional", "content": whole}
    return xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
