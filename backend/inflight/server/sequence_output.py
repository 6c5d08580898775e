"""What one sequence of a request has generated and its client has not received yet.

Tokens become text here, and a stop string ends the sequence. Knows no response sender and no other sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight.errors import InvalidRequest
from inflight.replay import DeliveredSequence
from inflight.result import FinishReason, Result
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.tensor_values import Array
from inflight.text.detokenizer import Detokenizer

OF_PROMPT = ("prompt_", "context_")
"""Prefixes of the names of tensors whose first dimension is the prompt's tokens, not the generated ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt as a non-streamed response repeats it before the generated text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class SequenceOutput:
    """One continuation of a prompt on its way to the client."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        echo: Prompt | None,
        network_outputs: Sequence[str] = (),
        text_of_token: Callable[[int], str] = str,
        repeats: Collection[str] = (),
    ) -> None:
        """`echo`: None for streams. `network_outputs`: names of the outputs of the network that the client asked for,
        in its order. `text_of_token`: see Chunk. `repeats`: see Dialect."""
        self._index = index
        self._network_outputs = network_outputs
        self._text_of_token = text_of_token
        self._repeats = repeats
        # What was taken and is repeated.
        self._taken_text = ""
        self._taken_log_probs: list[float] = []
        self._taken_context_logits: Array | None = None
        self._arrays: dict[str, list[Array]] = {}
        self._detokenizer = detokenizer
        self.finish_reason = FinishReason.NOT_FINISHED
        self.num_tokens = 0
        """Tokens generated here, without those that follow a stop string."""
        self.has_streamed = False
        """Whether a chunk before its last one was taken."""
        self.is_delivered = False
        """Whether its last chunk was taken."""
        self._text = "" if echo is None else echo.text
        self._token_ids = [] if echo is None else list(echo.token_ids)
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0
        self._num_undelivered = 0

    @property
    def is_finished(self) -> bool:
        """Whether it is complete: further results are ignored."""
        return self.finish_reason is not FinishReason.NOT_FINISHED

    def has_something_to_show(self, waits_for_text: bool) -> bool:
        """A token whose text is still held back is of no use to a client that reads text: it waits for the next one."""
        return bool(self._text) if waits_for_text else self._num_undelivered > 0

    def add(self, result: Result) -> None:
        """Merge a result into what was not delivered yet."""
        if self.is_finished:
            return
        num_before = self._detokenizer.num_tokens
        self._text += self._detokenizer.push(result.output_token_ids)
        num_taken = self._detokenizer.num_tokens - num_before
        self._token_ids += result.output_token_ids[:num_taken]
        self._log_probs += result.log_probs[:num_taken]
        self._cum_log_prob = result.cum_log_prob - sum(result.log_probs[num_taken:])
        self._add_tensors(result, num_taken)
        self._num_undelivered += num_taken
        self.num_tokens += num_taken
        if result.is_sequence_final and not self._detokenizer.is_stopped:
            self._text += self._detokenizer.flush()
            self.finish_reason = result.finish_reason or FinishReason.LENGTH
        if self._detokenizer.is_stopped:
            self.finish_reason = FinishReason.STOP_WORDS

    def resume(self, delivered: DeliveredSequence, finish_reason: FinishReason) -> None:
        """Go on behind what the client has from a server that ended. Raises InvalidRequest if the sequence had ended
        with a stop string before."""
        self._detokenizer.push(delivered.token_ids)
        self._cum_log_prob = delivered.cum_log_prob
        self.has_streamed = bool(delivered.token_ids)
        self.finish_reason = finish_reason
        self.is_delivered = self.is_finished
        if self._detokenizer.is_stopped and not self.is_finished:
            raise InvalidRequest("resume_token holds a stop string, behind which nothing is generated")

    def take_chunk(self, num_input_tokens: int, unfinished: str) -> Chunk:
        """All that was not delivered, and what is repeated. `unfinished`: the finish reason that a chunk has before the
        last one."""
        arrays = self._joined_arrays()
        if "context_logits" in self._repeats:
            self._taken_context_logits = arrays.get("context_logits", self._taken_context_logits)
            if self.is_finished:
                arrays["context_logits"] = self._taken_context_logits
        chunk = Chunk(
            sequence_index=self._index,
            text=self._taken_text + self._text,
            stop_string=self._detokenizer.stop_string,
            token_ids=self._token_ids,
            log_probs=self._taken_log_probs + self._log_probs,
            cum_log_prob=self._cum_log_prob,
            finish_reason=self.finish_reason.wire or unfinished,
            num_input_tokens=num_input_tokens,
            num_output_tokens=self._num_undelivered,
            text_of_token=self._text_of_token,
            **arrays,
        )
        self._arrays = {}
        if "text" in self._repeats:
            self._taken_text = chunk.text
        if "log_probs" in self._repeats:
            self._taken_log_probs = chunk.log_probs
        self._text, self._token_ids, self._log_probs, self._num_undelivered = "", [], [], 0
        self.has_streamed = self.has_streamed or not self.is_finished
        self.is_delivered = self.is_finished
        return chunk

    def _add_tensors(self, result: Result, num_taken: int) -> None:
        for tensor in result.tensors:
            array = tensor.array()
            if not tensor.name.startswith(OF_PROMPT):
                array = array[:num_taken]
            self._arrays.setdefault(tensor.name, []).append(array)

    def _joined_arrays(self) -> dict[str, Any]:
        """Fields of Chunk. Outputs of the network are one array, their features side by side in the order asked for."""
        joined = {name: np.concatenate(arrays) for name, arrays in self._arrays.items()}
        for name, prefix in (("hidden_states", ""), ("context_hidden_states", "context_")):
            names = [prefix + output for output in self._network_outputs]
            parts = [joined.pop(each) for each in names if each in joined]
            if parts:
                joined[name] = np.concatenate(parts, axis=1)
        return joined
