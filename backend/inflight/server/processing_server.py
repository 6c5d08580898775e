"""The backend behind `preprocessing` and `postprocessing`: requests that the tokenizer alone can answer.

    inflight-text-…    two threads that do the work and answer, for short and long requests
    inflight-sign      the heartbeat that shows the supervisor that this process is alive

Its front of the engine says what a request may be, and gets no request. Its metrics are tritonserver's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.executor.front.front import Front
from inflight.server.outcome import refused
from inflight.server.processing import Process
from inflight.server.reply import Reply
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.request_parameters import parse_parameters
from inflight.server.tensors.tensor_values import ReadLimits, gather, split
from inflight.server.threads.sending_thread import log_failure
from inflight.server.threads.sign_thread import SignThread
from inflight.server.threads.tokenizing_threads import TokenizingThreads, text_length


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    clients: Sequence[ClientRequest]
    wanted: frozenset[str] | None
    reply: Reply


class ProcessingServer:
    """One Triton model instance. As BackendServer for model.py."""

    def __init__(
        self,
        *,
        pb_utils: Any,
        executor: Front,
        dialect: Dialect,
        process: Process,
        read_limits: ReadLimits,
        instance: str,
        is_unary: bool,
    ) -> None:
        """See BackendServer."""
        self._pb_utils = pb_utils
        self._executor = executor
        self._dialect = dialect
        self._process = process
        self._read_limits = read_limits
        self._is_unary = is_unary
        self._working = TokenizingThreads[_Job](self._answer)
        self._signs = SignThread(instance)

    def start(self) -> None:
        self._working.start()
        self._signs.start()

    def accept(self, request: Any) -> None:
        """Take one pb_utils.InferenceRequest. Never raises, and ensures that it gets exactly one response."""
        try:
            reply = Reply(self._pb_utils, request.get_response_sender(), is_unary=self._is_unary)
        except Exception as error:
            log_failure("taking a request", error)
            return
        try:
            job = self._read(request, reply)
            self._working.put(job, sum(map(text_length, job.clients)))
        except Exception as error:
            self._refuse(error, reply)

    def is_ready(self) -> bool:
        return self._executor.is_ready()

    def close(self) -> None:
        """Answer what was accepted and join the threads. No thread touches pb_utils afterwards."""
        with contextlib.ExitStack() as ending:  # runs the callbacks in reverse order
            ending.callback(self._executor.shutdown)
            ending.callback(self._working.stop)
            ending.callback(self._signs.stop)

    def _read(self, request: Any, reply: Reply) -> _Job:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = parse_parameters(request.parameters())
        return _Job(
            clients=[self._dialect.read(prompt, self._read_limits, parameters) for prompt in split(arrays)],
            wanted=self._dialect.wanted(request.requested_output_names()),
            reply=reply,
        )

    def _answer(self, job: _Job) -> None:
        try:
            rows = zip(self._process.answer(job.clients), job.clients, strict=True)
            arrays = [self._dialect.write(results, client, job.wanted) for results, client in rows]
            job.reply.send(gather(arrays), final=True)
        except Exception as error:
            self._refuse(error, job.reply)

    @staticmethod
    def _refuse(error: Exception, reply: Reply) -> None:
        code, sentence, _ = refused(error)
        reply.fail(code, sentence)
