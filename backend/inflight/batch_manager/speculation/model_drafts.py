"""Drafts of the runner's draft model: only their number is decided here; the runner makes them as a step begins."""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS
from inflight.batch_manager.speculation.payoff import DRAFT_COST, Payoff
from inflight.scheduler_output import DRAFTED
from inflight.speculative_decoding import DraftTargetDecodingConfig

MODEL_DRAFT_COST = 2 * DRAFT_COST
"""Making a draft costs about as much as verifying it, if the draft model is a fifth of the network."""
LONE_STEP_COST = 1
"""A sequence alone in its batch loses no step behind the one that verifies: only the host's work between them, which no
step hides."""


class ModelDrafts:
    """A Drafter that always has drafts, so it comes last."""

    __slots__ = ("_payoff", "num_seen")

    def __init__(self, config: DraftTargetDecodingConfig) -> None:
        self._payoff = Payoff(
            config.max_draft_len,
            draft_cost=MODEL_DRAFT_COST,
            lone_step_cost=LONE_STEP_COST,
        )
        self.num_seen = 0
        """Leading tokens that the draft model has computed, apart from prefills: these it computes in any case."""

    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        count = min(most, self._payoff.draft_len)
        # What the draft model has to catch up with must be known here: all but the last token.
        if count <= 0 or num_pending > 1 or self._payoff.is_resting(len(token_ids)):
            return NO_DRAFTS
        return [DRAFTED] * count

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int) -> None:
        self._payoff.account(num_drafts, num_accepted, num_tokens, num_running)
        # The last token is not computed yet, nor is the last draft, which may be the token before it.
        self.num_seen = num_tokens - 1 - (num_accepted == num_drafts)
