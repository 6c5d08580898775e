"""The outputs that follow one compiled grammar, in its process: the masks of their next tokens, and forced ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import xgrammar

from inflight.runtime.guided.compiling import TOO_LARGE
from inflight.runtime.guided.forced_text import ForcedText
from inflight.runtime.guided.messages import Advance, Mask
from inflight.runtime.guided.vocabulary import Vocabulary

DEAD_END = "no token of the vocabulary continues the output within the grammar"
DOES_NOT_FOLLOW = "the output so far does not follow the grammar"


@dataclass(slots=True)
class Output:
    matcher: xgrammar.GrammarMatcher
    end_ids: list[int]
    forced: list[int] = field(default_factory=list)
    """Of the tokens last found to be forced, those that are still to come."""

    def note(self, token_ids: list[int]) -> None:
        """The output goes on with these tokens."""
        count = len(token_ids)
        self.forced = self.forced[count:] if self.forced[:count] == token_ids else []


class Matchers:
    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._forced_text = ForcedText(vocabulary)
        self._outputs: dict[int, Output] = {}
        self._errors: dict[int, str] = {}  # of those that no mask is found for any more
        self._words = np.zeros((1, -(-len(vocabulary.num_bytes) // 32)), dtype=np.int32)

    def begin(self, name: int, end_ids: list[int], text: str = "") -> bool:
        """Make the matcher of an output that begins with `text`. Returns whether that follows the grammar."""
        made = xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=end_ids or None)
        self._outputs[name] = Output(made, end_ids)
        return not text or bool(made.accept_string(text))

    def advance(self, message: Advance) -> Iterator[Mask]:
        """Take tokens in, and yield exactly the masks that are asked for. To be exhausted."""
        name, num_missing = message.matcher, message.num_masks
        try:
            for mask in self._find_masks(message) if name not in self._errors else ():
                num_missing -= 1
                yield mask
        except (MemoryError, RuntimeError):
            self._errors[name] = TOO_LARGE
        for _ in range(num_missing):
            yield Mask(name, b"", self._errors[name])

    def close(self, matcher: int) -> None:
        self._outputs.pop(matcher, None)
        self._errors.pop(matcher, None)

    def _find_masks(self, message: Advance) -> Iterator[Mask]:
        """Those that are asked for, or none if the output does not follow the grammar."""
        name = message.matcher
        if name not in self._outputs:
            self.begin(name, message.end_ids or [])
        output = self._outputs[name]
        matcher = output.matcher
        for token_id in message.token_ids:
            if not matcher.is_terminated() and not matcher.accept_token(token_id):
                self._errors[name] = DOES_NOT_FOLLOW
                return
        output.note(message.token_ids)
        if message.wants_mask:
            forced: list[int] = []
            if not output.forced and not matcher.is_terminated():
                forced = output.forced = self._forced_text.next_tokens(matcher)
            yield self._mask(name, output, forced)
        num_accepted, follows = 0, True
        for draft in message.drafts:
            if matcher.is_terminated():
                follows = follows and draft in output.end_ids
            elif follows:
                follows = matcher.accept_token(draft)
                num_accepted += follows
            yield self._mask(name, output) if follows else Mask(name, b"")
        if num_accepted:
            matcher.rollback(num_accepted)

    def _mask(self, name: int, output: Output, forced: list[int] | None = None) -> Mask:
        words = self._words
        may_end = output.matcher.is_terminated()
        if may_end:
            words.fill(0)  # only end tokens follow an end token, where min_tokens asks for more
        else:
            output.matcher.fill_next_token_bitmask(words, 0)
            may_end = output.matcher.is_completed()
        bits = words.view(np.uint32)[0]
        for end_id in output.end_ids:
            bit = np.uint32(1 << end_id % 32)
            bits[end_id // 32] = bits[end_id // 32] | bit if may_end else bits[end_id // 32] & ~bit
        if not bits.any():
            return Mask(name, b"", DEAD_END)
        return Mask(name, bits.tobytes(), forced=forced or [])
