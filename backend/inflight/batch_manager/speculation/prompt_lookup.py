"""Drafts from earlier text: what followed the last tokens where they have stood before, in the prompt or the output."""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS
from inflight.batch_manager.speculation.ngram_index import NGramIndex
from inflight.batch_manager.speculation.payoff import Payoff
from inflight.speculative_decoding import NGramDecodingConfig


class PromptLookup:
    """A Drafter (Saxena 2023)."""

    __slots__ = ("_index", "_payoff")

    def __init__(self, config: NGramDecodingConfig) -> None:
        self._index = NGramIndex(config.max_matching_ngram_size)
        self._payoff = Payoff(config.max_draft_len)

    def share_prompt(self, other: PromptLookup, num_tokens: int) -> None:
        """Index the prompt, of so many tokens, together with `other`, another sequence of the same request."""
        self._index = other._index.fork(num_tokens)

    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        self._index.extend(token_ids)
        count = min(most, self._payoff.draft_len)
        if count <= 0 or self._payoff.is_resting(len(token_ids)):
            return NO_DRAFTS
        return self._index.continuation(token_ids, num_pending + count)[num_pending:]

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int) -> None:
        self._payoff.account(num_drafts, num_accepted, num_tokens, num_running)
