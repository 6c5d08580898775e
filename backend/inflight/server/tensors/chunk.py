"""The content of one response, independent of the dialect, which turns it into tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.result import PerfMetrics
from inflight.server.tensors.tensor_values import Array

OF_REQUEST = ("batch_index", "sequence_index", "num_input_tokens", "perf_metrics.", "prompt_", "context_", "guide_")
"""What the names of values begin with that a request has once, however many sequences it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """All output of one sequence that was not delivered before."""

    batch_index: int = 0
    sequence_index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """One natural logarithm for each generated token among `token_ids`, if the client asked for them."""
    cum_log_prob: float = 0.0
    """Sum over all generated tokens of the sequence so far."""
    finish_reason: str = ""
    stop_string: str = ""
    """The one that ended the sequence; "" = none has."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Generated tokens in this chunk."""

    perf_metrics: PerfMetrics | None = None
    """Of the whole request, on its last chunk; None if its sequences were ended before the ranks had reported them."""
    resume_token: str | None = None
    """What this chunk adds to the resume token of its stream; None = the request has none."""

    guide_not_enforced: list[str] | None = None
    """On its last chunk: pointer and keyword of what a schema says and the output need not follow. None = nothing."""

    context_phase_params: Array | None = None
    """Of the whole request, on its last chunk: uint8. None = it has none."""

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

    text_of_token: Callable[[int], str] = str

    @property
    def generated_ids(self) -> list[int]:
        """`token_ids` without the prompt's."""
        return self.token_ids[len(self.token_ids) - self.num_output_tokens :]

    @property
    def sequence_length(self) -> int:
        return len(self.token_ids)

    @property
    def stop_reason(self) -> str:
        """As TensorRT-LLM's LLM API has it behind tritonserver: the stop string that ended the sequence, or "None"."""
        return self.stop_string or "None"

    @property
    def log_probs_json(self) -> str:
        """As vLLM has them: for each generated token an object with the token and the likeliest ones by their ids.
        The rank of a chosen token that is not among the likeliest is unknown. "null" if they were not asked for."""
        if self.top_token_ids is None or self.top_log_probs is None:
            return "null"
        chosen = zip(self.token_ids[len(self.token_ids) - len(self.log_probs) :], self.log_probs, strict=True)
        likeliest = zip(self.top_token_ids.tolist(), self.top_log_probs.tolist(), strict=True)
        return json.dumps([self._entries(*of, *top) for of, top in zip(chosen, likeliest, strict=True)])

    def _entries(
        self, token: int, log_prob: float, top_ids: list[int], top_log_probs: list[float]
    ) -> dict[int, dict[str, object]]:
        ranked: list[tuple[int, float, int | None]]
        ranked = [(each, value, rank) for rank, (each, value) in enumerate(zip(top_ids, top_log_probs, strict=True), 1)]
        if token not in top_ids:
            ranked.insert(0, (token, log_prob, None))
        return {
            each: {"logprob": value, "rank": rank, "decoded_token": self.text_of_token(each)}
            for each, value, rank in ranked
        }


def is_of_request(value: str) -> bool:
    """Whether an attribute of Chunk is the whole request's, and not of one sequence."""
    return value.startswith(OF_REQUEST)
