"""Drafts that the request brings: the beginning of its output, as the client guesses it."""

from __future__ import annotations

from inflight.batch_manager.speculation.drafter import NO_DRAFTS
from inflight.scheduler_output import NO_DRAFT


class GivenTokens:
    """A Drafter until the output differs from what was given, or has reached its end."""

    __slots__ = ("_num_matched", "_num_prompt_tokens", "_tokens")

    def __init__(self, tokens: list[int], num_prompt_tokens: int) -> None:
        self._tokens = tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._num_matched = 0

    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        if not self._tokens or not self._still_match(token_ids):
            return NO_DRAFTS
        first = self._num_matched + num_pending
        return self._tokens[first : first + most]

    def next_index(self, token_ids: list[int]) -> int:
        """Which of the given tokens comes next, if those before it are the output so far; otherwise NO_DRAFT."""
        return self._num_matched if self._tokens and self._still_match(token_ids) else NO_DRAFT

    def is_followed(self, token_ids: list[int], num_pending: int) -> bool:
        """Whether the output may follow them beyond `num_pending` tokens that are still on the device."""
        return self.next_index(token_ids) != NO_DRAFT and self._num_matched + num_pending < len(self._tokens)

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int) -> None:
        """The first wrong one ends them: there is nothing to weigh."""

    def _still_match(self, token_ids: list[int]) -> bool:
        """Whether the output so far is what was given, and more was given than that."""
        output = token_ids[self._num_prompt_tokens + self._num_matched :]
        expected = self._tokens[self._num_matched : self._num_matched + len(output)]
        self._num_matched += len(output)
        if output != expected or self._num_matched >= len(self._tokens):
            self._tokens = NO_DRAFTS
        return bool(self._tokens)
