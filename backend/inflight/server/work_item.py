"""One Triton request with its response sender, from execute() to its single final response.

It belongs to one thread at a time: the thread of execute(), then a tokenising thread, and the sending thread once the
engine has it. Two exceptions: the thread of execute() may set `is_stopped`, and the watch thread calls
`poll_cancelled`. tritonserver frees its side of a request with the final response, so asking afterwards whether it was
cancelled would read freed memory: a lock excludes that.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from msgspec import structs

from inflight.errors import RequestCancelled, RequestTimedOut
from inflight.request import Request
from inflight.result import FinishReason, PerfMetrics, Result
from inflight.server.reply import Reply
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect
from inflight.text.detokenizer import Detokenizer
from inflight.text.safe_text import safe_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt as a non-streamed response repeats it before the generated text."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class WorkItem:
    """A request that the engine serves, its undelivered output, and the reply to its client."""

    def __init__(
        self,
        *,
        request: Request,
        client: ClientRequest,
        dialect: Dialect,
        reply: Reply,
        requested: frozenset[str] | None,
    ) -> None:
        """`request` has no tokens before `prepare`. `requested`: names of the requested outputs, None = all."""
        self.request = request
        self.client = client
        self.is_cancelled = False
        """Whether its client has disconnected. Set by the watch thread."""
        self.is_stopped = False
        """Whether its client has asked to stop it. Set by the thread of execute()."""
        self.is_answered = False
        """Whether the final response was sent."""
        self.is_broken = False
        """Whether handling its output or sending a response has failed."""
        self.accepted_ns = time.monotonic_ns()
        self.answered_ns = 0
        self.num_output_tokens = 0
        """Generated tokens, without those that follow a stop string."""
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
        self._has_streamed = False

    def prepare(self, request: Request, detokenizer: Detokenizer, echo: Prompt | None) -> None:
        """Set the request that the engine will get and the detokenizer of its output. `echo`: None for streams.

        The time that was spent before this call is taken off the request's allotted time. Raises RequestTimedOut if
        none is left.
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
        """The error message for a client that stopped it before its first token."""
        return f"request Id {self.shown_id} has been stopped. Request is ignored."

    @property
    def is_finished(self) -> bool:
        """Whether its output is complete: further results are ignored."""
        return self._finish_reason is not FinishReason.NOT_FINISHED

    @property
    def has_news(self) -> bool:
        """Whether there is a response to send: new output if it is a stream, the whole output if not."""
        if self.is_answered:
            return False
        return self.is_finished or (self.client.stream and not self.is_cancelled and self._has_something_to_show())

    @property
    def can_wait(self) -> bool:
        """Whether the next response may be delayed: it is neither the first of a stream nor the final one."""
        return self._has_streamed and not self.is_finished

    @property
    def is_completed(self) -> bool:
        """Whether its whole output was produced. A later error of the engine (after a stop string) does not matter."""
        return self.is_finished and not (self.is_broken or self.is_cancelled)

    @property
    def finish_reason(self) -> str:
        return self._finish_reason.wire

    @property
    def shown_id(self) -> str:
        """The client's own id of the request, made safe for logs and messages; else the engine's id."""
        return safe_text(self.request.client_id) or str(self.request.request_id)

    def add(self, result: Result) -> None:
        """Merge a result into the output that was not delivered yet."""
        self.perf_metrics = result.request_perf_metrics or self.perf_metrics
        if self.is_finished:
            return
        num_before = self._detokenizer.num_tokens
        self._text += self._detokenizer.push(result.output_token_ids)
        num_taken = self._detokenizer.num_tokens - num_before
        self._token_ids += result.output_token_ids[:num_taken]
        self._add_log_probs(result, num_taken)
        self._num_undelivered += num_taken
        self.num_output_tokens += num_taken
        if result.is_final and not self._detokenizer.is_stopped:
            self._text += self._detokenizer.flush()
            self._finish_reason = result.finish_reason or FinishReason.LENGTH
        if self._detokenizer.is_stopped:
            self._finish_reason = FinishReason.STOP_WORDS

    def deliver(self) -> None:
        """Send one response with all undelivered output, if `has_news`."""
        if not self.has_news:
            return
        if self.is_finished:
            self._send_final(self._take_chunk())
        else:
            self._reply.send(self._dialect.write(self._take_chunk(), self.client, self._requested))
            self._has_streamed = True

    def fail(self, code: str, message: str) -> None:
        """Send the final response as an error, unless a final response was sent."""
        with self._lock:
            if not self.is_answered:
                self._close()
                self._reply.fail(code, message)

    def poll_cancelled(self) -> bool:
        """Ask tritonserver whether the client has disconnected. Returns True only the first time."""
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
        """A token whose text is still held back is of no use to a client that reads text: it waits for the next one."""
        return bool(self._text) if self._waits_for_text else self._num_undelivered > 0

    def _add_log_probs(self, result: Result, num_taken: int) -> None:
        log_probs = result.log_probs
        self._log_probs += log_probs[:num_taken]
        self._cum_log_prob = result.cum_log_prob - sum(log_probs[num_taken:])

    def _take_chunk(self) -> Chunk:
        chunk = Chunk(
            text=self._text,
            token_ids=self._token_ids,
            log_probs=self._log_probs,
            cum_log_prob=self._cum_log_prob,
            finish_reason=self._finish_reason.wire or self._dialect.unfinished,
            num_input_tokens=len(self.request.input_token_ids),
            num_output_tokens=self._num_undelivered,
        )
        self._text, self._token_ids, self._log_probs, self._num_undelivered = "", [], [], 0
        return chunk
