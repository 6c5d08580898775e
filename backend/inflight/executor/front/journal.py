"""What a front knows of a request in flight: enough to answer for it, whatever happens to the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.request import Request
from inflight.result import Result


@dataclass(slots=True)
class JournalEntry:
    """One request from its acceptance to its final response."""

    request: Request
    output_token_ids: list[int] = field(default_factory=list)
    """Of the sequence so far, as delivered."""
    cum_log_prob: float = 0.0

    def note(self, result: Result) -> None:
        """Take down what is being delivered."""
        self.output_token_ids += result.output_token_ids
        self.cum_log_prob = result.cum_log_prob
