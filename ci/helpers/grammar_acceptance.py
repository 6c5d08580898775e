"""Which texts a grammar takes: byte by byte, so that no tokenizer decides."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import xgrammar
from llguidance import LLMatcher

from inflight.guided_decoding import GuidedDecodingParams, GuideType, Reasoning
from inflight.guides.limits import PARSER_LIMITS
from inflight.guides.translate import byte_tokenizer, translate

END = 256


class Acceptance:
    """Of one grammar in llguidance's Lark."""

    def __init__(self, grammar: str) -> None:
        self._matcher = LLMatcher(
            byte_tokenizer(), LLMatcher.grammar_from_lark(grammar), log_level=0, limits=PARSER_LIMITS
        )
        assert not self._matcher.is_error(), self._matcher.get_error()

    def takes(self, text: str) -> bool:
        """The whole output may be this."""
        return self._reads(text) and self._may_end

    def begins(self, text: str) -> bool:
        """An output may begin so."""
        return self._reads(text)

    def _reads(self, text: str) -> bool:
        self._matcher.reset()
        given = list(text.encode())
        read = self._matcher.try_consume_tokens(given)
        self._may_end = read == len(given) and self._matcher.is_accepting()
        return read == len(given)


def acceptance(
    guide_type: GuideType, guide: str = "", *, reasoning: Reasoning | None = None, **fields: Any
) -> Acceptance:
    """Of a guide, translated. Raises InvalidRequest as that does."""
    params = GuidedDecodingParams(guide_type=guide_type, guide=guide, reasoning=reasoning, **fields)
    return Acceptance(translate(params).grammar)


@lru_cache(maxsize=1)
def _xgrammar_compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [bytes([value]) for value in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=END + 1, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def xgrammar_takes(grammar: xgrammar.Grammar, text: str) -> bool:
    """By XGrammar, where that is right."""
    matcher = xgrammar.GrammarMatcher(_xgrammar_compiler().compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.accept_token(END)
