"""What a front records of a request in flight: the request and the tokens delivered, which outlive the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.request import Request
from inflight.result import Result


@dataclass(slots=True)
class JournalEntry:
    """One request from its acceptance to its final response."""

    request: Request
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens delivered so far."""
    cum_log_prob: float = 0.0

    def note(self, result: Result) -> None:
        """Record a result that is being delivered. A request of several sequences cannot be continued by other ranks:
        nothing is recorded of it."""
        if self.request.num_return_sequences > 1:
            return
        self.output_token_ids += result.output_token_ids
        self.cum_log_prob = result.cum_log_prob
