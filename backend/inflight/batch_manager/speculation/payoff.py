"""Whether guessing pays for one sequence: how many drafts a step is worth, and when to try no more for a while."""

from __future__ import annotations

FIRST_DRAFT_LEN = 2
"""Every sequence tries, and where its guesses are no good each of these is lost: with a draft model never right, 16
sequences got 0.98 of their tokens per second of CPU time with 2, and 0.91 with 4 (a thread of a Xeon, 2026-11-22)."""
TOKEN_GAIN, STEP_COST, DRAFT_COST = 5, 5, 1
"""In fifths of a step. Each accepted draft saves a step. One that verifies costs its sequence the step behind it, which
waits for the host, and a fifth of a step for each draft, more beside many sequences: so it is on two CPU cores, where
16 rows take four times as long as one. A GPU computes drafts at less cost."""
SEQUENCES_OF_DRAFT_COST = 8
"""So many more sequences in the batch add another DRAFT_COST."""
MIN_SCORE, MAX_SCORE = -10, 20
"""Speculation rests when gains minus costs have fallen to the first; above the second no more is saved up, so that it
rests soon where the text stops repeating itself."""
FIRST_REST, MAX_REST = 32, 1024
"""Tokens without drafts: twice as many after every rest that one attempt follows in vain, and as many times more as
drafts cost more beside many sequences."""


class Payoff:
    __slots__ = (
        "_draft_cost",
        "_lone_step_cost",
        "_max_draft_len",
        "_min_score",
        "_rest",
        "_rests_until",
        "_score",
        "_score_after_rest",
        "draft_len",
    )

    def __init__(
        self,
        max_draft_len: int,
        *,
        draft_cost: int = DRAFT_COST,
        lone_step_cost: int = STEP_COST,
        allowance: int = 0,
    ) -> None:
        """`lone_step_cost`: in place of STEP_COST for a sequence alone in its batch. `allowance`: how much more may be
        spent in vain before it rests, and a quarter of that after each rest."""
        self.draft_len = min(FIRST_DRAFT_LEN, max_draft_len)
        """Drafts that the next step is worth."""
        self._max_draft_len = max_draft_len
        self._draft_cost = draft_cost
        self._lone_step_cost = lone_step_cost
        self._min_score = MIN_SCORE - allowance
        self._score_after_rest = self._min_score + max(STEP_COST, allowance // 4)
        self._score = 0
        self._rest = FIRST_REST
        self._rests_until = 0

    def is_resting(self, num_tokens: int) -> bool:
        """Whether its sequence, now of `num_tokens` tokens, should not be guessed."""
        return num_tokens < self._rests_until

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int) -> None:
        """A step has verified drafts; its sequence now has `num_tokens` tokens, and is one of `num_running`."""
        is_full = num_accepted == num_drafts
        self.draft_len = min(2 * num_drafts if is_full else max(num_accepted + 1, 2), self._max_draft_len)
        crowd = num_running // SEQUENCES_OF_DRAFT_COST
        draft_cost = self._draft_cost + DRAFT_COST * crowd
        step_cost = STEP_COST if num_running > 1 else self._lone_step_cost
        gain = TOKEN_GAIN * num_accepted - step_cost - draft_cost * num_drafts
        if (TOKEN_GAIN - draft_cost) * self._max_draft_len <= step_cost:
            gain = self._min_score - self._score  # beside so many sequences not even right drafts pay
        self.add(gain, num_tokens, patience=1 + crowd)

    def add(self, gain: int, num_tokens: int, patience: int = 1) -> None:
        """A step of its sequence, which now has `num_tokens` tokens, has gained so many fifths of a step. If it rests
        now, then `patience` times as long as otherwise."""
        self._score = min(self._score + gain, MAX_SCORE)
        if self._score > 0:
            self._rest = FIRST_REST
        elif self._score <= self._min_score:
            self._rests_until = num_tokens + self._rest * patience
            self._rest = min(2 * self._rest, MAX_REST)
            self._score = self._score_after_rest
