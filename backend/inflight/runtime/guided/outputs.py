"""Outputs that follow grammars: their tokens so far, and the masks of their next ones.

An output belongs to a row. The worker loop says what happens to it, the mask thread takes that in, in the same order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from inflight.runtime.guided.forced_text import ForcedText
from inflight.runtime.guided.library import GrammarLibrary, GrammarRefused, State, Words

DEAD_END = "no token of the vocabulary continues the output within the grammar"
DOES_NOT_FOLLOW = "the output so far does not follow the grammar"
NO_DRAFTS: list[int] = []
"""Never written to."""


@dataclass(frozen=True, slots=True)
class Mask:
    bits: bytes
    """One bit a token, lowest first, in words of 32 bits. Empty if there is none, see `error`; without an error it is
    behind a draft that the grammar forbids, where it does not matter."""
    error: str = ""
    forced: list[int] = field(default_factory=list)
    """Most likely next tokens where the grammar leaves the next text no choice; empty also if they continue the last
    ones that were found."""


@dataclass(slots=True, eq=False)
class Work:
    """What the mask thread is to do for one output: take tokens in, and find masks, in this order."""

    output: Output
    token_ids: list[int]
    wants_mask: bool = True
    """Of the token behind `token_ids`."""
    drafts: list[int] = field(default_factory=list)
    """Guessed next tokens. The output does not take them in; a mask is wanted behind each of them."""
    masks: list[Mask] = field(default_factory=list)
    """Those that are wanted, once `is_done`."""
    is_done: Event = field(default_factory=Event)
    """Of the batch that it is in."""


class Output:
    """Its first methods are the worker loop's, `take` and `masks` are the mask thread's."""

    def __init__(self, state: State, end_ids: list[int], forced_text: ForcedText) -> None:
        self._state = state
        self._end_ids = end_ids
        self._forced_text = forced_text
        self._steps: deque[list[int]] = deque()  # the drafts of each step that was begun and has not brought its tokens
        self._asked: list[Work] = []  # for the next step that samples
        self._has_ended = False
        self._forced: list[int] = []  # of the tokens last found to be forced, those that are still to come
        self._error = ""

    # -- on the worker loop --------------------------------------------------------------------------------------------

    def begin(self, token_ids: list[int]) -> Work:
        """The output begins with these tokens."""
        return self._ask(Work(self, token_ids))

    def begin_step(self, drafts: list[int]) -> Work | None:
        """A step was begun that verifies `drafts`. The masks behind them are asked for once all tokens before them are
        known."""
        is_next = not self._steps
        self._steps.append(drafts)
        return self._ask(Work(self, [], wants_mask=False, drafts=drafts)) if drafts and is_next else None

    def advance(self, token_ids: list[int]) -> Work:
        """The tokens that the oldest step has brought; the masks of the step after it are asked for."""
        if self._steps:
            self._steps.popleft()
        self._asked.clear()
        return self._ask(Work(self, token_ids, drafts=self._steps[0] if self._steps else NO_DRAFTS))

    def wait(self, count: int) -> list[Mask]:
        """The newest `count` masks, once they are found: of the next token, then of those behind drafts."""
        for work in self._asked:
            work.is_done.wait()
        return [mask for work in self._asked for mask in work.masks][-count:]

    def _ask(self, work: Work) -> Work:
        self._asked.append(work)
        return work

    # -- on the mask thread --------------------------------------------------------------------------------------------

    def take(self, token_ids: list[int]) -> None:
        """The output goes on with these tokens."""
        count = len(token_ids)
        self._forced = self._forced[count:] if self._forced[:count] == token_ids else []
        for token_id in token_ids:
            if not self._has_ended and not self._error:
                self._take_one(token_id)

    def _take_one(self, token_id: int) -> None:
        if token_id in self._end_ids:
            self._has_ended = True
            return
        try:
            if not self._state.accept(token_id):
                self._error = DOES_NOT_FOLLOW
        except GrammarRefused as refused:
            self._error = str(refused)

    def fail(self, reason: str) -> None:
        """It has no further masks."""
        self._error = self._error or reason

    def needs_state(self) -> bool:
        """Whether its grammar has a say in the next mask."""
        return not self._has_ended and not self._error

    @property
    def state(self) -> State:
        return self._state

    def mask(self, row: Words, may_end: bool, error: str) -> Mask:
        """The next token's, from what the library wrote to `row`."""
        self._error = self._error or error
        if self._error:
            return Mask(b"", self._error)
        forced: list[int] = []
        if not self._forced and not self._has_ended:
            forced = self._forced = self._forced_text.next_tokens(self._state)
        return self._finished(row, may_end, forced)

    def masks_behind(self, drafts: list[int], before: Mask, library: GrammarLibrary, words: Words) -> list[Mask]:
        """Those behind each of `drafts`. `before`: the mask of the first of them. `words`: (1, …), to write to."""
        found: list[Mask] = []
        num_accepted, has_ended = 0, self._has_ended
        try:
            for draft in drafts:
                if not allows(before, draft):
                    break
                has_ended = has_ended or draft in self._end_ids
                if has_ended:
                    words.fill(0)
                    may_end, error = True, ""
                elif self._state.accept(draft):
                    num_accepted += 1
                    ((may_end, error),) = library.fill([self._state], words)
                else:
                    break
                before = Mask(b"", error) if error else self._finished(words[0], may_end, [])
                found.append(before)
                if before.error:
                    break
        except GrammarRefused as refused:
            found.append(Mask(b"", str(refused)))
        finally:
            if num_accepted:
                self._state.rollback(num_accepted)
        error = found[-1].error if found else ""
        return found + [Mask(b"", error)] * (len(drafts) - len(found))

    def _finished(self, row: Words, may_end: bool, forced: list[int]) -> Mask:
        """With the tokens that end the output. Behind one, where min_tokens asks for more, only they follow."""
        for end_id in self._end_ids:
            bit = np.uint32(1 << end_id % 32)
            row[end_id // 32] = row[end_id // 32] | bit if may_end else row[end_id // 32] & ~bit
        return Mask(row.tobytes(), forced=forced) if row.any() else Mask(b"", DEAD_END)


def allows(mask: Mask, token_id: int) -> bool:
    return bool(mask.bits) and bool(mask.bits[token_id // 8] >> token_id % 8 & 1)
