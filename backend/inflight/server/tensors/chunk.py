"""What one response tells a client, in neutral words; a dialect turns it into tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Everything of one sequence that was not delivered before."""

    sequence_index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of the generated ones among `token_ids`."""
    cum_log_prob: float = 0.0
    """Over the whole sequence so far."""
    finish_reason: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Generated tokens in this chunk."""

    @property
    def sequence_length(self) -> int:
        return len(self.token_ids)
