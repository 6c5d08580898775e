"""The backend behind `embedding` and `rerank`: requests that the engine answers with numbers, and with no tokens.

    inflight-text-…    two threads that tokenise requests, short and long ones, and pass them to the engine
    inflight-answer    the only thread that answers requests which the engine has accepted, and cancels those whose
                       client has disconnected
    inflight-sign      the heartbeat that shows the supervisor that this process is alive

A row of a request's tensors is one or several requests to the engine; all rows share one response, and the first error
is the answer to all. Its metrics are tritonserver's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from inflight.asking.vectors import Row, row_of
from inflight.errors import (
    EngineUnavailable,
    InflightError,
    InvalidRequest,
    RequestCancelled,
    RequestTimedOut,
    ResponseFailed,
)
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.open_requests import OpenRequests
from inflight.request import Request
from inflight.result import Response
from inflight.server.outcome import refused
from inflight.server.pooled import ASKS, PooledAsk, PooledModel
from inflight.server.reply import Reply
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.request_parameters import REQUEST_TYPE, parse_parameters, read_parameters
from inflight.server.tensors.tensor_values import MAX_TEXTS, Array, ReadLimits, gather, split
from inflight.server.threads.sending_thread import IDLE_SECONDS, NOT_MADE, log_failure
from inflight.server.threads.sign_thread import SignThread
from inflight.server.threads.tokenizing_threads import TokenizingThreads, text_length

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""How long requests in flight may take to finish when the model is unloaded."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """A request from execute() to its response. Of one thread at a time: a tokenising one, then the answering one."""

    clients: Sequence[ClientRequest]
    wanted: frozenset[str] | None
    reply: Reply
    triton_id: str
    asks: list[PooledAsk] = field(default_factory=list)
    """Of each client."""
    places: dict[int, int] = field(default_factory=dict)
    """Engine request, in their order -> index of its client."""
    rows: dict[int, Row] = field(default_factory=dict)
    """Of the engine requests that have ended."""

    def said(self, index: int, message: str) -> str:
        """Of a client among several."""
        return message if len(self.clients) == 1 else f"prompt {index}: {message}"

    def answers(self) -> list[object]:
        """Of each client, from all rows."""
        rows = iter(self.rows[request_id] for request_id in self.places)
        return [ask.answer([next(rows) for _ in ask.requests]) for ask in self.asks]


class PooledServer:
    """One Triton model instance. As BackendServer for model.py."""

    def __init__(
        self,
        *,
        pb_utils: Any,
        executor: Front,
        dialect: Dialect,
        model: PooledModel,
        read_limits: ReadLimits,
        instance: str,
        is_unary: bool,
        cancellation_check_seconds: float,
    ) -> None:
        """See BackendServer."""
        self._pb_utils = pb_utils
        self._executor = executor
        self._dialect = dialect
        self._model = model
        self._read_limits = read_limits
        self._is_unary = is_unary
        self._period = cancellation_check_seconds
        self._changed = threading.Condition()
        self._open: dict[int, _Job] = {}
        """By the ids of engine requests that have not ended."""
        self._is_closed = False
        self._has_failed = False
        self._stopping = threading.Event()
        self._tokenizing = TokenizingThreads[_Job](self._submit)
        self._answering = threading.Thread(target=self._run, name="inflight-answer", daemon=True)
        self._signs = SignThread(instance, lambda: not self._has_failed)
        self._open_requests = OpenRequests(instance)

    def start(self) -> None:
        self._tokenizing.start()
        self._answering.start()
        self._signs.start()

    def accept(self, request: Any) -> None:
        """Take one pb_utils.InferenceRequest. Never raises, and ensures that it gets exactly one response."""
        try:
            reply = Reply(
                self._pb_utils,
                request.get_response_sender(),
                is_unary=self._is_unary,
                open_requests=self._open_requests,
            )
        except Exception as error:
            log_failure("taking a request", error)
            return
        try:
            job = self._read(request, reply)
            self._tokenizing.put(job, sum(map(text_length, job.clients)))
        except Exception as error:
            self._refuse(error, reply)

    def is_ready(self) -> bool:
        return self._executor.is_ready() and self._answering.is_alive()

    def close(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Wait at most `drain_seconds` for requests in flight, and join the threads. Every request gets its response.
        No thread touches pb_utils afterwards."""
        with contextlib.ExitStack() as ending:  # runs the callbacks in reverse order
            ending.callback(self._open_requests.close)
            ending.callback(self._answering.join)
            ending.callback(self._stopping.set)
            ending.callback(self._tokenizing.stop)
            ending.callback(self._executor.shutdown)
            ending.callback(self._signs.stop)
            self._drain(drain_seconds)

    def _drain(self, seconds: float) -> None:
        self._tokenizing.join()
        # A relaunch may still succeed; an engine that is down answers nothing any more.
        may_answer = self._executor.is_ready() or self._executor.is_relaunching()
        with self._changed:
            if may_answer and not self._changed.wait_for(lambda: not self._open, seconds):
                logger.warning("%d texts are still in flight after %g s: ending them", len(self._open), seconds)
            self._is_closed = True

    # -- the thread of execute() ---------------------------------------------------------------------------------------

    def _read(self, request: Any, reply: Reply) -> _Job:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = parse_parameters(request.parameters())
        common = read_parameters(parameters, request.timeout())
        if "request_type" in common:
            raise InvalidRequest(f"{REQUEST_TYPE} is about generated tokens, and this model answers with none")
        clients = [self._client(rows, parameters, common) for rows in split(arrays)]
        num_texts = sum(len(client.passages or [""]) for client in clients)
        if num_texts > MAX_TEXTS:
            raise InvalidRequest(f"the request has {num_texts} texts, more than {MAX_TEXTS}: send fewer at once")
        return _Job(
            clients=clients,
            wanted=self._dialect.wanted(request.requested_output_names()),
            reply=reply,
            triton_id=str(request.request_id() or ""),
        )

    def _client(
        self, rows: Mapping[str, Array], parameters: Mapping[str, Any], common: Mapping[str, Any]
    ) -> ClientRequest:
        client = self._dialect.read(rows, self._read_limits, parameters)
        return replace(client, **common) if common else client

    # -- tokenising threads --------------------------------------------------------------------------------------------

    def _submit(self, job: _Job) -> None:
        try:
            requests = self._requests(job)
            with self._changed:  # an answer may come at once, and waits here until it is known whose it is
                if self._is_closed:
                    raise EngineUnavailable(SHUT_DOWN)
                self._executor.enqueue_requests(requests)
                self._open.update(dict.fromkeys(job.places, job))
        except Exception as error:
            self._refuse(error, job.reply)

    def _requests(self, job: _Job) -> list[Request]:
        """Raises InvalidRequest."""
        numbered: list[Request] = []
        ask = ASKS[self._dialect.name]
        for index, client in enumerate(job.clients):
            try:
                asked = ask(client, self._model, self._executor.limits)
            except InvalidRequest as error:
                raise InvalidRequest(job.said(index, str(error))) from None
            job.asks.append(asked)
            for request in asked.requests:
                request_id = self._executor.next_request_id()
                job.places[request_id] = index
                numbered.append(
                    structs.replace(
                        request,
                        request_id=request_id,
                        client_id=job.triton_id,
                        priority=request.priority if client.priority is None else client.priority,
                        cache_salt=client.cache_salt or "",
                    )
                )
        return numbered

    # -- the answering thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            looked = time.monotonic()
            while True:
                responses = self._executor.await_responses(timeout=self._period)
                for response in responses:
                    self._take(response)
                if time.monotonic() - looked >= self._period:
                    self._end_abandoned()
                    looked = time.monotonic()
                if not responses and self._stopping.wait(IDLE_SECONDS):
                    break
        except Exception as error:
            log_failure("the answering thread", error)
            self._has_failed = True
        for job in self._jobs():
            self._fail(job, EngineUnavailable("the engine was shut down"))

    def _jobs(self) -> list[_Job]:
        with self._changed:
            return [*dict.fromkeys(self._open.values())]

    def _take(self, response: Response) -> None:
        request_id, result = response.request_id, response.result
        with self._changed:
            job = self._open.get(request_id)
        if job is None:
            return
        if result is None:
            self._end(job)
            job.reply.fail(response.error_code, job.said(job.places[request_id], response.error_msg))
            return
        if (row := row_of(result)) is not None:
            job.rows[request_id] = row
        if not result.is_final:
            return
        if request_id not in job.rows:
            self._fail(job, RequestTimedOut("the engine's time for this request was over, or it was shut down"))
        elif len(job.rows) == len(job.places):
            self._end(job)
            self._answer(job)

    def _answer(self, job: _Job) -> None:
        try:
            rows = zip(job.answers(), job.clients, strict=True)
            job.reply.send(gather([self._dialect.write([each], client, job.wanted) for each, client in rows]), True)
        except Exception as error:
            log_failure("answering a request", error)
            job.reply.fail(ResponseFailed.code, NOT_MADE)

    def _end_abandoned(self) -> None:
        for job in self._jobs():
            if job.reply.is_cancelled():
                self._fail(job, RequestCancelled("the request was cancelled"))

    def _fail(self, job: _Job, error: InflightError) -> None:
        self._end(job)
        job.reply.fail(error.code, str(error))

    def _end(self, job: _Job) -> None:
        """What the engine still computes of it is cancelled."""
        with self._changed:
            left = [request_id for request_id in job.places if self._open.pop(request_id, None) is not None]
            self._changed.notify_all()
        for request_id in left:
            if request_id not in job.rows:
                self._executor.cancel_request(request_id)

    @staticmethod
    def _refuse(error: Exception, reply: Reply) -> None:
        code, sentence, _ = refused(error)
        reply.fail(code, sentence)
