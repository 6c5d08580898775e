"""The slots that one sequence holds besides that of its row: copies of what recurrent layers know behind some of its
tokens. Written by SequenceStates alone."""

from __future__ import annotations

NO_STATE = -1


class KeptStates:
    __slots__ = ("behind_drafts", "behind_prompt", "behind_tokens", "prompt_length", "source", "standing")

    def __init__(self) -> None:
        self.source = NO_STATE
        """What is copied into its row's slot before it computes its next token: a snapshot, a draft's state, or the
        slot of another row."""
        self.behind_prompt = NO_STATE
        """What its siblings start on."""
        self.prompt_length = 0
        """Leading tokens that `behind_prompt` is behind."""
        self.behind_tokens: list[tuple[int, int]] = []
        """(number of leading tokens, slot) of snapshots that nobody finds yet, because the tokens are not known."""
        self.behind_drafts: list[tuple[int, int]] = []
        """The same behind each token of the step that verifies drafts."""
        self.standing = b""
        """Hash of its latest snapshot if the next one takes its place; empty = none does."""

    @property
    def slots(self) -> list[int]:
        """All of them, a slot as often as it is held."""
        some = [slot for slot in (self.source, self.behind_prompt) if slot != NO_STATE]
        return [*some, *(slot for _, slot in self.behind_tokens + self.behind_drafts)]
