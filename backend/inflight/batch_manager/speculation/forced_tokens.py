"""Drafts of text that the request's grammar forces (jump-forward): there is one text, but several ways to write it."""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS
from inflight.batch_manager.speculation.given_tokens import GivenTokens
from inflight.batch_manager.speculation.payoff import Payoff

MAX_DRAFT_LEN = 16
MIN_DRAFT_LEN = 2
"""One accepted draft saves a step, and verifying costs one."""


class ForcedTokens:
    """A Drafter of the tokens that the runner has found to be forced."""

    __slots__ = ("_payoff", "_tokens")

    def __init__(self) -> None:
        self._payoff = Payoff(MAX_DRAFT_LEN)
        self._tokens = GivenTokens(NO_DRAFTS, 0)

    def note(self, tokens: list[int], num_tokens: int) -> None:
        """`tokens` most likely follow the first `num_tokens`."""
        self._tokens = GivenTokens(tokens, num_tokens)

    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        count = min(most, self._payoff.draft_len)
        if count < MIN_DRAFT_LEN or self._payoff.is_resting(len(token_ids)):
            return NO_DRAFTS
        drafts = self._tokens.propose(token_ids, num_pending, count)
        return drafts if len(drafts) >= MIN_DRAFT_LEN else NO_DRAFTS

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int) -> None:
        self._payoff.account(num_drafts, num_accepted, num_tokens, num_running)
