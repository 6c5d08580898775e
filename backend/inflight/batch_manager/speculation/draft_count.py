"""What the steps of one iteration have found of drafts."""

from __future__ import annotations


class DraftCount:
    __slots__ = ("num_accepted_tokens", "num_draft_tokens", "num_sequences")

    def __init__(self) -> None:
        self.num_draft_tokens = self.num_accepted_tokens = self.num_sequences = 0

    def reset(self) -> None:
        if self.num_sequences:
            self.num_draft_tokens = self.num_accepted_tokens = self.num_sequences = 0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts that a step has verified for one sequence."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_sequences += 1
