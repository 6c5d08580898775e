"""One prompt of a Triton request with its reply, from execute() to its single final response.

Each response carries tokens of one sequence, or of all if they are gathered. A stream gets responses of each of its
sequences as they grow; without streaming each sequence is answered when it ends, and gathered ones when all have ended.
The final response is the last one of the sequence that ends last. Where a request has several prompts, their work items
share its reply.

It belongs to one thread at a time: the thread of execute(), then a tokenising thread, and the sending thread once the
engine has it. Two exceptions: the thread of execute() may set `is_stopped`, and the watch thread calls
`poll_cancelled`. tritonserver frees its side of a request with the final response, so asking afterwards whether it was
cancelled would read freed memory: a lock excludes that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from msgspec import structs

from inflight.errors import RequestCancelled, RequestTimedOut
from inflight.request import Request
from inflight.result import FinishReason, PerfMetrics, Result
from inflight.server.batch_reply import PromptReply
from inflight.server.reply import Reply
from inflight.server.resume_token import Part, ResumeTokenWriter
from inflight.server.sequence_output import SequenceOutput
from inflight.server.tensors.chunk import Chunk
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.tensor_values import Array
from inflight.text.safe_text import safe_text


class WorkItem:
    """A prompt that the engine serves, its undelivered output, and the reply to its client."""

    def __init__(
        self,
        *,
        request: Request,
        client: ClientRequest,
        dialect: Dialect,
        reply: Reply | PromptReply,
        requested: frozenset[str] | None,
        gathers: bool = False,
        trace_parent: Mapping[str, str] | None = None,
    ) -> None:
        """`request` has no tokens before `prepare`. `requested`: names of the requested outputs, None = all. `gathers`:
        each response holds all sequences. `trace_parent`: of the span that tritonserver has made of it, see
        EndedRequest; None = it has made none."""
        self.trace_parent = trace_parent
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
        self.perf_metrics: PerfMetrics | None = None
        self._context_phase_params: Array | None = None
        self._dialect = dialect
        self._gathers = gathers
        self._outputs: list[SequenceOutput] = []
        self._resume_token: ResumeTokenWriter | None = None
        self._guide_not_enforced: list[str] | None = None
        self._stopped: list[int] = []
        self._groups: list[list[SequenceOutput]] = []
        """Those whose tokens share responses."""
        self._reply = reply
        self._requested = requested
        self._waits_for_text = client.input_ids is None and (requested is None or "text_output" in requested)
        self._lock = threading.Lock()

    def prepare(
        self,
        request: Request,
        outputs: list[SequenceOutput],
        resume_token: ResumeTokenWriter | None = None,
        guide_not_enforced: list[str] | None = None,
    ) -> None:
        """Set the request that the engine will get, an output for each of its sequences, what writes its resume token,
        and what is said of its guide, see Chunk.

        The time that was spent before this call is taken off the request's allotted time. Raises RequestTimedOut if
        none is left.
        """
        if request.allotted_time_ms:
            left = request.allotted_time_ms - (time.monotonic_ns() - self.accepted_ns) // 1_000_000
            if left <= 0:
                raise RequestTimedOut(f"request Id {self.shown_id} waited longer than the time it was allotted")
            request = structs.replace(request, allotted_time_ms=left)
        self.request = request
        self._guide_not_enforced = guide_not_enforced
        self._resume_token = resume_token
        self._outputs = outputs
        self._groups = [outputs] if self._gathers else [[output] for output in outputs]

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
        return bool(self._outputs) and all(output.is_finished for output in self._outputs)

    @property
    def has_news(self) -> bool:
        """Whether there is a response to send: new output if it is a stream, a whole sequence if not."""
        return not self.is_answered and (self.is_finished or bool(self._with_news()))

    @property
    def num_responses_ready(self) -> int:
        """Responses that `deliver` would send now."""
        return len(self._with_news()) if self.has_news else 0

    @property
    def can_wait(self) -> bool:
        """Whether the next responses may be delayed: none of them is the first of a sequence, or the last."""
        if self.is_finished or not any(output.has_streamed for output in self._outputs):
            return False
        return all(
            output.has_streamed and (output.is_delivered or not output.is_finished)
            for group in self._with_news()
            for output in group
        )

    @property
    def is_completed(self) -> bool:
        """Whether its whole output was produced. A later error of the engine (after a stop string) does not matter."""
        return self.is_finished and not (self.is_broken or self.is_cancelled)

    @property
    def finish_reason(self) -> str:
        """The first sequence's, unless the client or its time ended some other sequence early."""
        reasons = [output.finish_reason for output in self._outputs]
        early = [reason for reason in reasons if reason in (FinishReason.CANCELLED, FinishReason.TIMED_OUT)]
        return (*early, *reasons, FinishReason.NOT_FINISHED)[0].wire

    @property
    def finish_reasons(self) -> list[str]:
        """Of each sequence; "" for one that has not ended."""
        return [output.finish_reason.wire for output in self._outputs]

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens of all sequences that count: what follows a stop string does not."""
        return sum(output.num_tokens for output in self._outputs)

    @property
    def longest_output(self) -> int:
        """Generated tokens of its longest sequence."""
        return max((output.num_tokens for output in self._outputs), default=0)

    @property
    def shown_id(self) -> str:
        """The client's own id of the request, made safe for logs and messages; else the engine's id."""
        return safe_text(self.request.client_id) or str(self.request.request_id)

    def add(self, result: Result) -> None:
        """Merge a result into the output of its sequence that was not delivered yet."""
        self.perf_metrics = result.request_perf_metrics or self.perf_metrics
        if result.context_phase_params is not None:
            self._context_phase_params = np.frombuffer(result.context_phase_params.serialize(), np.uint8)
        output = self._outputs[result.sequence_index]
        was_finished = output.is_finished
        output.add(result)
        if output.is_finished and not (was_finished or result.is_sequence_final):
            self._stopped.append(result.sequence_index)

    def take_stopped(self) -> list[int]:
        """Indices of the sequences that a stop string has ended since the last call: ranks still compute them."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def deliver(self) -> None:
        """Send one response with all undelivered output, if `has_news`."""
        if not self.has_news:
            return
        ready = self._with_news()
        if self.is_finished:
            last = ready.pop() if ready else self._groups[-1]
            for group in ready:
                self._send(group)
            first, *others = self._take_chunks(last)
            first = replace(
                first,
                perf_metrics=self.perf_metrics,
                context_phase_params=self._context_phase_params,
                guide_not_enforced=self._guide_not_enforced,
            )
            self._send_final([first, *others])
        else:
            for group in ready:
                self._send(group)

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

    def _send_final(self, chunks: list[Chunk]) -> None:
        with self._lock:
            if self.is_cancelled:
                self._reply.fail("CANCELLED", "the request was cancelled")
            else:
                self._reply.send(self._dialect.write(chunks, self.client, self._requested), final=True)
            self._close()

    def _close(self) -> None:
        self.is_answered = True
        self.answered_ns = time.monotonic_ns()

    def _with_news(self) -> list[list[SequenceOutput]]:
        """Groups of outputs of which the client should get something now; none if it has left."""
        if self.is_cancelled:
            return []
        return [group for group in self._groups if self._has_news(group)]

    def _has_news(self, group: list[SequenceOutput]) -> bool:
        if self.client.stream:
            return any(self._is_news(output) for output in group)
        return all(output.is_finished for output in group) and not all(output.is_delivered for output in group)

    def _is_news(self, output: SequenceOutput) -> bool:
        if output.is_finished:
            return not output.is_delivered
        return output.has_something_to_show(self._waits_for_text)

    def _send(self, group: list[SequenceOutput]) -> None:
        self._reply.send(self._dialect.write(self._take_chunks(group), self.client, self._requested))

    def _take_chunks(self, group: list[SequenceOutput]) -> list[Chunk]:
        num_input_tokens, unfinished = len(self.request.input_token_ids), self._dialect.unfinished
        chunks = [output.take_chunk(num_input_tokens, unfinished) for output in group]
        if self._resume_token is not None:
            reasons = [output.finish_reason for output in group]
            chunks = [self._with_resume_token(*each) for each in zip(chunks, reasons, strict=True)]
        index = self.client.batch_index
        return chunks if index is None else [replace(chunk, batch_index=index) for chunk in chunks]

    def _with_resume_token(self, chunk: Chunk, finish_reason: FinishReason) -> Chunk:
        assert self._resume_token is not None
        part = Part(
            sequence_index=chunk.sequence_index,
            token_ids=chunk.generated_ids,
            cum_log_prob=chunk.cum_log_prob if self.request.output_config.return_log_probs else None,
            finish_reason=finish_reason,
        )
        return replace(chunk, resume_token=self._resume_token.write(part))
