"""Grammars by llguidance, the default: its limits count work, so what they refuse is the same on every machine.

Outputs of one grammar share what the library has learned about its expressions, so that the second output finds its
masks faster. A limit that is met with that is decided once more by a matcher that nobody has used: what it says depends
on nothing but the grammar and the output's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from inflight.guided_decoding import GuidedDecodingParams
from inflight.guides.limits import PARSER_LIMITS
from inflight.runtime.guided.library import Compiled, GrammarRefused, State, Words
from inflight.runtime.guided.vocabulary import Vocabulary

TOO_COMPLEX = "the grammar is too ambiguous to be followed: finding its next tokens takes too much work"
NOT_TRANSLATED = "guided decoding needs a guide that the front has translated, and this request has none"
SLICES = [rf'[^"\\\x00-\x1F\x7F\u2028\u2029]{count}' for count in ("{1,6}", "{1,9}", "{1,12}", "{1,16}", "+")]
"""Text without signs of JSON, by its length. Where the grammar allows all text of a length, as within strings, the
library takes all its tokens in at once, and looks at the others alone. More lengths than the library's own two make
strings with `maxLength` cheaper, being without line separators what a `.` matches: both together take a fifth off the
time of masks, for schemas of the kinds that people use and 128,000 tokens (EPYC, 2026-11-26). Letters and digits by
themselves gain nothing."""


class LlguidanceLibrary:
    def __init__(self, vocabulary: Vocabulary, num_threads: int = 1) -> None:
        """`num_threads`: that find the masks of a step."""
        self._vocabulary = vocabulary
        self._vocab_size = len(vocabulary.texts)
        self._executor = LLExecutor(num_threads=num_threads)
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}  # by the special tokens that are shown
        # The library has an end token of its own, behind all others: each output brings those of its request.
        self._end_bit = np.uint32(1 << self._vocab_size % 32)
        self._words: Words = np.zeros((1, -(-(self._vocab_size + 1) // 32)), dtype=np.uint32)
        """`fill` writes to them first."""

    def compile(self, params: GuidedDecodingParams) -> Compiled:
        if not params.grammar:
            raise GrammarRefused(NOT_TRANSLATED)
        shown = tuple(sorted(set(params.shown_token_ids)))
        tokenizer = self._tokenizers.get(shown)
        if tokenizer is None:
            tokenizer = self._tokenizers[shown] = _tokenizer_of(self._vocabulary.showing(shown))
        grammar = LlguidanceGrammar(tokenizer, params.grammar)
        # Into words of its own: another thread may be filling those of the library.
        ((_, error),) = self._find([grammar.start()], np.zeros((1, self._words.shape[1]), dtype=np.uint32))
        if error:
            raise GrammarRefused(error)
        return grammar

    def fill(self, states: Sequence[State], words: Words) -> list[tuple[bool, str]]:
        given = [state for state in states if isinstance(state, LlguidanceState)]
        assert len(given) == len(states)
        if len(given) > len(self._words):
            self._words = np.zeros((len(given), self._words.shape[1]), dtype=np.uint32)
        rows = self._words[: len(given)]
        found = self._find(given, rows)
        words[:] = rows[:, : words.shape[1]]
        return found

    def _find(self, given: Sequence[LlguidanceState], rows: Words) -> list[tuple[bool, str]]:
        """The same as `fill`, into rows with a place for the library's own end token."""
        alike = _alike(given)
        firsts = [place for place, first in enumerate(alike) if place == first]
        self._fill([(given[place].matcher, place) for place in firsts], rows)
        for place in firsts:
            if given[place].has_failed:
                given[place].restart()
                self._fill([(given[place].matcher, place)], rows)
        if len(firsts) < len(given):
            rows[:] = rows[alike]
        ends = rows[:, self._vocab_size // 32]
        may_end = (ends & self._end_bit).astype(bool).tolist()
        ends &= ~self._end_bit
        return [
            (bool(may_end[place]), TOO_COMPLEX if given[first].has_failed else "") for place, first in enumerate(alike)
        ]

    def _fill(self, places: list[tuple[LLMatcher, int]], rows: Words) -> None:
        self._executor.unsafe_compute_mask_ptr(places, rows.ctypes.data, rows.shape[1] * 4, len(rows))


def _alike(states: Sequence[LlguidanceState]) -> list[int]:
    """For each state the place of the first one that has taken in the same tokens of the same grammar, and so has the
    same mask: as outputs that begin together have."""
    firsts: dict[tuple[int, int, int], int] = {}
    found = []
    for place, state in enumerate(states):
        tokens = state.token_ids
        first = firsts.setdefault((id(state.grammar), len(tokens), tokens[-1] if tokens else -1), place)
        found.append(first if states[first].token_ids == tokens else place)
    return found


class LlguidanceGrammar:
    def __init__(self, tokenizer: LLTokenizer, text: str) -> None:
        """Raises GrammarRefused."""
        self._tokenizer = tokenizer
        self._text = text
        self._shared = self._compile()
        if self._shared.is_error():
            raise GrammarRefused(TOO_COMPLEX)

    def start(self) -> LlguidanceState:
        return LlguidanceState(self, self._shared.deep_copy())

    def renew(self) -> LLMatcher:
        """One that shares nothing with those before, which have reached a limit together, but with those of outputs
        that begin from now on."""
        self._shared = self._compile()
        return self._shared.deep_copy()

    def _compile(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, self._text, log_level=0, limits=PARSER_LIMITS)


class LlguidanceState:
    def __init__(self, grammar: LlguidanceGrammar, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.token_ids: list[int] = []
        """Taken in so far."""

    @property
    def has_failed(self) -> bool:
        """Whether a limit was met: the matcher says nothing any more."""
        return self.matcher.is_error()

    def accept(self, token_id: int) -> bool:
        if self._has_taken(token_id):
            return True
        if self.has_failed:
            self.restart()
            if self._has_taken(token_id):
                return True
            if self.has_failed:
                raise GrammarRefused(TOO_COMPLEX)
        return False

    def _has_taken(self, token_id: int) -> bool:
        if self.matcher.try_consume_tokens([token_id]) != 1:
            return False
        self.token_ids.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.token_ids[len(self.token_ids) - num_tokens :]
        if self.has_failed or not self.matcher.rollback(num_tokens):
            self.restart()

    def forced_text(self) -> str:
        return self.matcher.compute_ff_bytes().decode("utf-8", "ignore")

    def restart(self) -> None:
        """Follow the same tokens with a matcher that nobody has used."""
        self.matcher = self.grammar.renew()
        self.matcher.try_consume_tokens(self.token_ids)


class _Tokens:
    """A vocabulary as the library reads it. It never tokenises: grammars are compiled without forced tokens."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary.texts)
        self.special_token_ids = [self.eos_token_id]
        self.tokens = [*vocabulary.texts, b"\xff<end>"]  # that byte begins tokens that are no text

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def _tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    tokens = _Tokens(vocabulary)
    wrapped = TokenizerWrapper(tokens)
    return LLTokenizer(wrapped, n_vocab=len(tokens.tokens), eos_token=tokens.eos_token_id, slices=SLICES)
