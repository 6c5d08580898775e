"""What a front records of a request in flight: the request and the tokens delivered, which outlive the ranks.

From the record come the parts of a response that the ranks need not send: the client's own id, and all tokens so far
for a request that wants them with every response.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from inflight.errors import InflightError
from inflight.request import Request
from inflight.result import Response, Result


@dataclass(slots=True)
class Delivered:
    """What was delivered of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Kept only for a request that wants everything with every response."""
    cum_log_prob: float = 0.0


@dataclass(slots=True)
class JournalEntry:
    """One request from its acceptance to its final response."""

    request: Request
    sequences: dict[int, Delivered] = field(default_factory=dict)
    """By sequence index; a sequence without a result yet is not there."""

    def note(self, response: Response) -> Response:
        """Record a response that is being delivered, and return it as the caller receives it."""
        if response.result is not None:
            delivered = self._note(response.result)
            if self.request.return_all_generated_tokens:
                everything = structs.replace(
                    response.result,
                    output_token_ids=list(delivered.token_ids),
                    log_probs=list(delivered.log_probs),
                )
                response = structs.replace(response, result=everything)
        if self.request.client_id:
            response = structs.replace(response, client_id=self.request.client_id)
        return response

    def fail(self, error: InflightError) -> Response:
        """The final response of a request that no rank answers."""
        return self.note(Response.of_error(self.request.request_id, error))

    def _note(self, result: Result) -> Delivered:
        delivered = self.sequences.get(result.sequence_index)
        if delivered is None:
            delivered = self.sequences[result.sequence_index] = Delivered()
        delivered.cum_log_prob = result.cum_log_prob
        if self.request.sampling_config.beam_width > 1:  # each result holds everything
            delivered.token_ids, delivered.log_probs = list(result.output_token_ids), list(result.log_probs)
            return delivered
        delivered.token_ids += result.output_token_ids
        if self.request.return_all_generated_tokens:
            delivered.log_probs += result.log_probs
        return delivered
