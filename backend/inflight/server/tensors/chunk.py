"""The content of one response, independent of the dialect, which turns it into tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.result import PerfMetrics
from inflight.server.tensors.tensor_values import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """All output of one sequence that was not delivered before."""

    sequence_index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """One natural logarithm for each generated token among `token_ids`, if the client asked for them."""
    cum_log_prob: float = 0.0
    """Sum over all generated tokens of the sequence so far."""
    finish_reason: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Generated tokens in this chunk."""

    perf_metrics: PerfMetrics | None = None
    """Of the whole request, on its last chunk; None if its sequences were ended before the ranks had reported them."""

    # None where the chunk has nothing of it. Their first dimension are tokens.
    top_token_ids: Array | None = None
    top_log_probs: Array | None = None
    generation_logits: Array | None = None
    hidden_states: Array | None = None
    prompt_log_probs: Array | None = None
    prompt_top_token_ids: Array | None = None
    prompt_top_log_probs: Array | None = None
    context_logits: Array | None = None
    context_hidden_states: Array | None = None

    @property
    def sequence_length(self) -> int:
        return len(self.token_ids)
