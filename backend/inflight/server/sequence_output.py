"""What one sequence of a request has generated and its client has not received yet.

Tokens become text here, and a stop string ends the sequence. Knows no response sender and no other sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.result import FinishReason, Result
from inflight.server.tensors.chunk import Chunk
from inflight.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a non-streamed answer repeats before its own text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class SequenceOutput:
    """One continuation of a prompt on its way to the client."""

    def __init__(self, index: int, detokenizer: Detokenizer, echo: Prompt | None) -> None:
        """`echo`: None for streams."""
        self._index = index
        self._detokenizer = detokenizer
        self.finish_reason = FinishReason.NOT_FINISHED
        self.num_tokens = 0
        """Generated tokens that count: what follows a stop string does not."""
        self.has_streamed = False
        """A chunk of it was taken before its last one."""
        self.is_delivered = False
        """Its last chunk was taken."""
        self._text = "" if echo is None else echo.text
        self._token_ids = [] if echo is None else list(echo.token_ids)
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0
        self._num_undelivered = 0

    @property
    def is_finished(self) -> bool:
        """Nothing more will be added."""
        return self.finish_reason is not FinishReason.NOT_FINISHED

    def has_something_to_show(self, waits_for_text: bool) -> bool:
        """A text client gains nothing from a token whose text is still held back; it goes with the next."""
        return bool(self._text) if waits_for_text else self._num_undelivered > 0

    def add(self, result: Result) -> None:
        """Merge new tokens into what is still to be delivered."""
        if self.is_finished:
            return
        num_before = self._detokenizer.num_tokens
        self._text += self._detokenizer.push(result.output_token_ids)
        num_taken = self._detokenizer.num_tokens - num_before
        self._token_ids += result.output_token_ids[:num_taken]
        self._log_probs += result.log_probs[:num_taken]
        self._cum_log_prob = result.cum_log_prob - sum(result.log_probs[num_taken:])
        self._num_undelivered += num_taken
        self.num_tokens += num_taken
        if result.is_sequence_final and not self._detokenizer.is_stopped:
            self._text += self._detokenizer.flush()
            self.finish_reason = result.finish_reason or FinishReason.LENGTH
        if self._detokenizer.is_stopped:
            self.finish_reason = FinishReason.STOP_WORDS

    def take_chunk(self, num_input_tokens: int, unfinished: str) -> Chunk:
        """All that was not delivered. `unfinished`: the finish reason that a chunk has before the last one."""
        chunk = Chunk(
            sequence_index=self._index,
            text=self._text,
            token_ids=self._token_ids,
            log_probs=self._log_probs,
            cum_log_prob=self._cum_log_prob,
            finish_reason=self.finish_reason.wire or unfinished,
            num_input_tokens=num_input_tokens,
            num_output_tokens=self._num_undelivered,
        )
        self._text, self._token_ids, self._log_probs, self._num_undelivered = "", [], [], 0
        self.has_streamed = self.has_streamed or not self.is_finished
        self.is_delivered = self.is_finished
        return chunk
