"""From what a request asks to a compiled grammar, in the process of that grammar."""

from __future__ import annotations

import json

import xgrammar

from inflight.guided_decoding import GuidedDecodingParams, GuideType, Reasoning

MAX_WHITESPACE = 8
"""Characters of whitespace in a row between the parts of a JSON text, and behind a reasoning; without a limit, weak
models write no others."""
ANY_OBJECT = '{"type": "object"}'
TOO_LARGE = "the grammar needs too much memory"


class GrammarRefused(Exception):
    """A grammar is not served; the message is the sentence for the client."""


def compile_grammar(params: GuidedDecodingParams, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    """Raises GrammarRefused."""
    try:
        grammar = _grammar(params)
        if params.reasoning is not None:
            grammar = xgrammar.Grammar.concat(_free(params.reasoning), grammar)
        return compiler.compile_grammar(grammar)
    except MemoryError:
        raise GrammarRefused(TOO_LARGE) from None
    except Exception as error:
        if "bad_alloc" in str(error):
            raise GrammarRefused(TOO_LARGE) from None
        raise GrammarRefused(f"the guide of type {params.guide_type.value} cannot be compiled") from None


def _grammar(params: GuidedDecodingParams) -> xgrammar.Grammar:
    """What the answer follows."""
    make = xgrammar.Grammar
    if params.guide_type is GuideType.JSON:
        return make.from_json_schema(ANY_OBJECT, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    if params.guide_type is GuideType.JSON_SCHEMA:
        return make.from_json_schema(params.guide, max_whitespace_cnt=MAX_WHITESPACE)
    if params.guide_type is GuideType.REGEX:
        return make.from_regex(params.guide)
    if params.guide_type is GuideType.EBNF_GRAMMAR:
        return make.from_ebnf(params.guide)
    return make.from_structural_tag(params.guide)


def _free(reasoning: Reasoning) -> xgrammar.Grammar:
    """Any text up to the closing tag, and whitespace; it may be left out unless it was begun by the prompt."""
    begin = "" if reasoning.is_open else reasoning.opening
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.closing}
    space = {"type": "regex", "pattern": rf"[ \t\n\r]{{0,{MAX_WHITESPACE}}}"}
    whole = {"type": "sequence", "elements": [thought, space]}
    form = whole if reasoning.is_open else {"type": "optional", "content": whole}
    return xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": form}))
