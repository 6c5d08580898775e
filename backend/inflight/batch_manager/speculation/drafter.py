"""A source of drafts of one sequence."""

from __future__ import annotations

from typing import Protocol

NO_DRAFTS: list[int] = []
"""Never written to."""


class Drafter(Protocol):
    def propose(self, token_ids: list[int], num_pending: int, most: int) -> list[int]:
        """At most `most` tokens that may follow `token_ids` and `num_pending` more, which are still on the device and
        are guessed, too. None = NO_DRAFTS. Those that only the runner can make are DRAFTED, each of them."""

    def account(self, num_drafts: int, num_accepted: int, num_tokens: int, num_running: int) -> None:
        """A step has verified drafts of this source; see Speculation.account."""
