"""One Triton request with its response sender, from execute() to its single final response.

Who may touch it: the thread of execute(), then the one that tokenises, and once it is handed to the engine the sending
thread alone. Two exceptions: the thread of execute() may note a stop, and the watching thread calls `poll_cancelled`.
tritonserver frees its side of a request with the final response, so asking afterwards whether it was cancelled would
read freed memory: a lock keeps the two apart.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from inflight.errors import RequestCancelled, RequestTimedOut
from inflight.request import Request
from inflight.result import FinishReason, PerfMetrics, Result
from inflight.server.reply import Reply
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.tensor_values import Array
from inflight.server.text.detokenizer import Detokenizer
from inflight.server.text.safe_text import safe_text

OF_PROMPT = ("prompt_", "context_")
"""Beginnings of the names of tensors whose first dimension are the prompt's tokens, not the generated ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a non-streamed answer repeats before its own text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class WorkItem:
    """A request that the engine serves, its undelivered output, and the way back to its client."""

    def __init__(
        self,
        *,
        request: Request,
        client: ClientRequest,
        dialect: Dialect,
        reply: Reply,
        requested: frozenset[str] | None,
    ) -> None:
        """`request` has no tokens yet: see `prepare`. `requested`: names of the wanted outputs, None = all."""
        self.request = request
        self.client = client
        self.is_cancelled = False
        """Whether its client has disconnected. Set by the watch thread."""
        self.is_stopped = False
        """Whether its client has asked to stop it. Set by the thread of execute()."""
        self.is_answered = False
        """The final response was sent."""
        self.is_broken = False
        """An answer to it could not be made."""
        self.accepted_ns = time.monotonic_ns()
        self.answered_ns = 0
        self.num_output_tokens = 0
        """Generated tokens that count: what follows a stop string does not."""
        self.perf_metrics: PerfMetrics | None = None
        self._dialect = dialect
        self._detokenizer: Detokenizer
        self._reply = reply
        self._requested = requested
        self._waits_for_text = client.input_ids is None and (requested is None or "text_output" in requested)
        self._lock = threading.Lock()
        self._finish_reason = FinishReason.NOT_FINISHED
        self._text = ""
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0
        self._num_undelivered = 0
        self._arrays: dict[str, list[Array]] = {}
        self._has_streamed = False

    def prepare(self, request: Request, detokenizer: Detokenizer, echo: Prompt | None) -> None:
        """Take what the engine will compute and what makes text of it. `echo`: None for streams.

        Raises RequestTimedOut if the time it was allotted is over; what is left of it is the engine's.
        """
        if request.allotted_time_ms:
            left = request.allotted_time_ms - (time.monotonic_ns() - self.accepted_ns) // 1_000_000
            if left <= 0:
                raise RequestTimedOut(f"request Id {self.shown_id} waited longer than the time it was allotted")
            request = structs.replace(request, allotted_time_ms=left)
        self.request = request
        self._detokenizer = detokenizer
        if echo is not None:
            self._text, self._token_ids = echo.text, list(echo.token_ids)

    def check_wanted(self) -> None:
        """Raise RequestCancelled if its client has disconnected or has asked to stop it."""
        if self.is_cancelled:
            raise RequestCancelled("the request was cancelled")
        if self.is_stopped:
            raise RequestCancelled(self.stopped_sentence)

    @property
    def stopped_sentence(self) -> str:
        """Told to a client that stopped it before its first token."""
        return f"request Id {self.shown_id} has been stopped. Request is ignored."

    @property
    def is_finished(self) -> bool:
        """Nothing more will be added."""
        return self._finish_reason is not FinishReason.NOT_FINISHED

    @property
    def has_news(self) -> bool:
        """There is something that its client should have: at once if it is a stream, at the end if not."""
        if self.is_answered:
            return False
        return self.is_finished or (self.client.stream and not self.is_cancelled and self._has_something_to_show())

    @property
    def can_wait(self) -> bool:
        """Its client has had a first response, and the next one is not the last."""
        return self._has_streamed and not self.is_finished

    @property
    def is_completed(self) -> bool:
        """Its client has all of it; what becomes of steps behind a stop string changes nothing."""
        return self.is_finished and not (self.is_broken or self.is_cancelled)

    @property
    def finish_reason(self) -> str:
        return self._finish_reason.wire

    @property
    def shown_id(self) -> str:
        """The client's own id for it, fit to be echoed."""
        return safe_text(self.request.client_id) or str(self.request.request_id)

    def add(self, result: Result) -> None:
        """Merge new tokens into what is still to be delivered."""
        self.perf_metrics = result.perf_metrics or self.perf_metrics
        if self.is_finished:
            return
        num_before = self._detokenizer.num_tokens
        self._text += self._detokenizer.push(result.output_token_ids)
        num_taken = self._detokenizer.num_tokens - num_before
        self._token_ids += result.output_token_ids[:num_taken]
        self._add_log_probs(result, num_taken)
        self._add_tensors(result, num_taken)
        self._num_undelivered += num_taken
        self.num_output_tokens += num_taken
        if result.is_final and not self._detokenizer.is_stopped:
            self._text += self._detokenizer.flush()
            self._finish_reason = result.finish_reason or FinishReason.LENGTH
        if self._detokenizer.is_stopped:
            self._finish_reason = FinishReason.STOP_WORDS

    def deliver(self) -> None:
        """Send what has come, if there is news."""
        if not self.has_news:
            return
        if self.is_finished:
            self._send_final(self._take_chunk())
        else:
            self._reply.send(self._dialect.write(self._take_chunk(), self.client, self._requested))
            self._has_streamed = True

    def fail(self, code: str, message: str) -> None:
        """Send the final response as an error, unless one was sent."""
        with self._lock:
            if not self.is_answered:
                self._close()
                self._reply.fail(code, message)

    def poll_cancelled(self) -> bool:
        """Ask tritonserver whether the client has left; True only the first time."""
        with self._lock:
            if self.is_answered or self.is_cancelled:
                return False
            self.is_cancelled = self._reply.is_cancelled()
            return self.is_cancelled

    def _send_final(self, chunk: Chunk) -> None:
        with self._lock:
            if self.is_cancelled:
                self._reply.fail("CANCELLED", "the request was cancelled")
            else:
                self._reply.send(self._dialect.write(chunk, self.client, self._requested), final=True)
            self._close()

    def _close(self) -> None:
        self.is_answered = True
        self.answered_ns = time.monotonic_ns()

    def _has_something_to_show(self) -> bool:
        """A text client gains nothing from a token whose text is still held back; it goes with the next."""
        return bool(self._text) if self._waits_for_text else self._num_undelivered > 0

    def _add_log_probs(self, result: Result, num_taken: int) -> None:
        log_probs = result.log_probs
        self._log_probs += log_probs[:num_taken]
        self._cum_log_prob = result.cum_log_prob - sum(log_probs[num_taken:])

    def _add_tensors(self, result: Result, num_taken: int) -> None:
        for tensor in result.tensors:
            array = tensor.array()
            if not tensor.name.startswith(OF_PROMPT):
                array = array[:num_taken]
            self._arrays.setdefault(tensor.name, []).append(array)

    def _joined_arrays(self) -> dict[str, Array]:
        """Fields of Chunk. Outputs of the network are one array, their features side by side in the order asked for."""
        joined = {name: np.concatenate(arrays) for name, arrays in self._arrays.items()}
        for name, prefix in (("hidden_states", ""), ("context_hidden_states", "context_")):
            names = [prefix + output for output in self.client.additional_outputs or ()]
            parts = [joined.pop(each) for each in names if each in joined]
            if parts:
                joined[name] = np.concatenate(parts, axis=1)
        return joined

    def _take_chunk(self) -> Chunk:
        chunk = Chunk(
            text=self._text,
            token_ids=self._token_ids,
            log_probs=self._log_probs,
            cum_log_prob=self._cum_log_prob,
            finish_reason=self._finish_reason.wire or self._dialect.unfinished,
            num_input_tokens=len(self.request.input_token_ids),
            num_output_tokens=self._num_undelivered,
            **self._joined_arrays(),
        )
        self._arrays = {}
        self._text, self._token_ids, self._log_probs, self._num_undelivered = "", [], [], 0
        return chunk
