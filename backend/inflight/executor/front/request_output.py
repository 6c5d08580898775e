"""What a user of the library sees of a request: the whole output so far, and what is new in it. Immutable values."""

from __future__ import annotations

import msgspec

from inflight.context_phase import ContextPhaseParams
from inflight.result import FinishReason, PerfMetrics


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of the prompt, as far as it is generated. "New" means since the same reader's last look; of a
    beam search everything is, because beams are given up for others."""

    index: int
    """Which of the request's sequences this is."""
    text: str
    """Whole characters only, cut off where the first stop string begins; never the prompt. Without a tokenizer ""."""
    text_diff: str
    """The new part of `text`."""
    token_ids: list[int]
    """All generated tokens; never the prompt."""
    token_ids_diff: list[int]
    """The new ones."""
    log_probs: list[float]
    """Natural log probability of each token, if the request asked for them."""
    cumulative_logprob: float
    """Their sum; 0 if the request did not ask for them."""
    finish_reason: FinishReason
    """NOT_FINISHED while it grows; `.wire` is the text that clients of the server receive."""
    decoding_iter: int = 0
    """Iterations of the engine that have brought it tokens so far."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All continuations of one prompt at one moment. The properties are those of the first one."""

    request_id: int
    prompt: str | None
    """The text that was given; None if token ids were."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    """Whether nothing will be added to any of them."""
    request_perf_metrics: PerfMetrics | None = None
    """Set once the engine has ended the request; stays None if a stop string ended it first."""
    context_phase_params: ContextPhaseParams | None = None
    """Of a finished context-only request whose output goes on."""
    arrival_time: float | None = None
    """As the request's program gave it."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def text_diff(self) -> str:
        return self.outputs[0].text_diff

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def token_ids_diff(self) -> list[int]:
        return self.outputs[0].token_ids_diff

    @property
    def log_probs(self) -> list[float]:
        return self.outputs[0].log_probs

    @property
    def cumulative_logprob(self) -> float:
        return self.outputs[0].cumulative_logprob

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason
