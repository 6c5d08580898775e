"""The backend behind model.py: accepts requests, owns the threads that answer, watch and measure, and ends them.

    inflight-text-…    two that tokenise and hand requests to the engine, short ones and long ones
    inflight-metrics   the only one that touches pb_utils' metrics
    inflight-send      the only one that answers requests which the engine has accepted
    inflight-watch     asks whether clients have left and whether the engine is still there
    inflight-sign      shows the supervisor that this process is alive

After `close` none of them touches pb_utils: what is behind it is gone by then.

A request that is refused is answered by the thread that has it: nobody else does yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inflight.config import EngineConfig
from inflight.errors import EngineUnavailable, InflightError, InvalidRequest, QueueFull
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.request import Request
from inflight.result import Response
from inflight.server.lost_model import give_up, is_supervised
from inflight.server.outcome import ended
from inflight.server.preparation import Preparation
from inflight.server.reply import Reply
from inflight.server.request_builder import RequestBuilder
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.request_parameters import read_parameters
from inflight.server.tensors.tensor_values import ReadLimits
from inflight.server.threads.metrics_thread import MetricsThread, Outcome, own_labels
from inflight.server.threads.response_pace import ResponsePace, choose_rate
from inflight.server.threads.sending_thread import SendingThread, log_failure
from inflight.server.threads.sign_thread import SignThread
from inflight.server.threads.tokenizing_threads import TokenizingThreads, text_length
from inflight.server.threads.watch_thread import WatchThread
from inflight.server.work_item import WorkItem
from inflight.server.work_items import WorkItems
from inflight.text.safe_text import safe_text
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""How long requests in flight may still take when the model is unloaded; tritonserver itself waits 30 s by default."""


class BackendServer:
    """One Triton model instance over a running executor."""

    def __init__(
        self,
        *,
        pb_utils: Any,
        executor: Front,
        tokenizer: Tokenizer,
        dialect: Dialect,
        config: EngineConfig,
        model_name: str,
        model_version: str,
        instance: str,
        deaths: Sequence[str] = (),
    ) -> None:
        """`instance`: tritonserver's name for this instance of the model. `deaths`: where the executor notes why the
        engine died, newest last."""
        self._deaths = deaths
        self._parting = threading.Lock()
        self._is_closing = False
        self._is_closed = False
        """The engine is gone for good: nothing is worth tokenising."""
        self._pb_utils = pb_utils
        self._executor = executor
        self._dialect = dialect
        self._config = config
        self._model_name = model_name
        builder = RequestBuilder(tokenizer, executor.limits, executor.generation_defaults)
        self._preparation = Preparation(tokenizer, builder, config.exclude_input_in_output)
        self._read_limits = ReadLimits(
            max_text_bytes=config.max_text_bytes,
            max_input_len=executor.limits.max_input_len,
            max_bytes_per_token=tokenizer.max_bytes_per_token,
        )
        self._items = WorkItems()
        self._metrics = MetricsThread(
            pb_utils,
            own_labels(model_name, model_version),
            config.stats_check_period_ms / 1000,
            executor.get_latest_batch_manager_stats,
            executor.num_requests_in_flight,
            executor.num_requests_queued,
        )
        rate = choose_rate(config.max_responses_per_second, executor.device, len(os.sched_getaffinity(0)))
        self._tokenizing = TokenizingThreads(self._submit)
        self._sending = SendingThread(executor, self._items, ResponsePace(rate), self._on_end)
        self._watch = WatchThread(
            executor, self._items, config.cancellation_check_period_ms / 1000, self._on_engine_lost
        )
        self._signs = SignThread(instance)

    def start(self) -> None:
        self._metrics.start()
        self._sending.start()
        self._tokenizing.start()
        self._watch.start()
        self._signs.start()

    def accept(self, request: Any) -> None:
        """Take one pb_utils.InferenceRequest; never raises, and sees to its one final response."""
        try:
            reply = Reply(self._pb_utils, request.get_response_sender())
        except Exception as error:
            log_failure("taking a request", error)
            return
        try:
            self._accept(request, reply)
        except Exception as error:
            code, sentence, outcome = _refusal(error)
            reply.fail(code, sentence)
            self._metrics.record(Outcome(outcome=outcome))

    def is_ready(self) -> bool:
        return self._executor.is_ready() and self._sending.is_alive()

    def close(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Let requests in flight finish, end the engine, join the threads. Every request gets its final response.

        Whatever of it fails, no thread touches pb_utils afterwards."""
        with self._parting:
            self._is_closing = True
        with contextlib.ExitStack() as ending:  # from the last to the first
            ending.callback(self._metrics.stop)
            ending.callback(self._sending.stop)
            ending.callback(self._tokenizing.stop)
            ending.callback(self._refuse_all)
            ending.callback(self._executor.shutdown)
            ending.callback(self._watch.stop)
            ending.callback(self._signs.stop)
            self._drain(drain_seconds)

    def _drain(self, drain_seconds: float) -> None:
        if self._executor.is_ready() and not self._items.wait_until_empty(drain_seconds):
            logger.warning("%d requests are still in flight after %g s: ending them", len(self._items), drain_seconds)

    def _refuse_all(self) -> None:
        self._is_closed = True

    def _accept(self, request: Any, reply: Reply) -> None:
        client = self._read(request)
        triton_id = str(request.request_id() or "")
        if client.stop:
            self._stop(triton_id)
            reply.close()
            return
        self._items.check_free(triton_id)
        self._check_open()
        length = text_length(client)
        item = self._make_item(request, reply, client, triton_id)
        # From here on others may see it: nothing may fail any more.
        self._items.add(item)
        self._tokenizing.put(item, length)

    def _check_open(self) -> None:
        """Raise unless a request may be taken. Those being tokenised wait too, and the engine does not know of them."""
        if self._is_closed:
            raise EngineUnavailable(SHUT_DOWN)
        limit = self._config.max_in_flight
        if limit and self._executor.num_requests_in_flight() + self._tokenizing.num_waiting >= limit:
            raise QueueFull()

    def _submit(self, item: WorkItem) -> None:
        """On a tokenising thread: hand the item to the engine, or see to its final response."""
        try:
            if self._is_closed:
                raise EngineUnavailable(SHUT_DOWN)
            self._preparation.prepare(item)
            self._executor.enqueue_request(item.request)
        except Exception as error:
            # From here on it may be answered only through the item: the sending thread does where an engine is lost.
            code, sentence, outcome = _refusal(error)
            # Its id is free before its client hears of that.
            self._items.release_triton_id(item)
            item.fail(code, sentence)
            if self._items.remove(item):
                self._metrics.record(Outcome(outcome=outcome))
            return
        if item.is_cancelled or item.is_stopped:
            # Its client left or stopped it before the engine knew of it.
            self._executor.cancel_request(item.request.request_id)

    def _read(self, request: Any) -> ClientRequest:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        client = self._dialect.read(arrays, self._read_limits)
        return replace(client, **read_parameters(request.parameters(), request.timeout()))

    def _stop(self, triton_id: str) -> None:
        if not triton_id:
            raise InvalidRequest("Cannot send stop request without specifying a request_id")
        item = self._items.find_triton_id(triton_id)
        if item is None:
            raise InvalidRequest(
                f"Received stop request for requestId {safe_text(triton_id)} but it's not active "
                "(might be completed already)."
            )
        # The note first: a request that is being tokenised is unknown to the engine until after its thread looks.
        item.is_stopped = True
        self._executor.cancel_request(item.request.request_id)

    def _make_item(self, request: Any, reply: Reply, client: ClientRequest, triton_id: str) -> WorkItem:
        assert client.max_tokens is not None
        names = request.requested_output_names()
        return WorkItem(
            request=Request(
                request_id=self._executor.next_request_id(),
                input_token_ids=[],
                max_tokens=client.max_tokens,
                client_id=triton_id,
            ),
            client=client,
            dialect=self._dialect,
            reply=reply,
            requested=frozenset(names) if names else None,
        )

    def _on_end(self, item: WorkItem, last: Response) -> None:
        self._metrics.record(ended(item, last))

    def _on_engine_lost(self) -> None:
        """Where a supervisor loads the model again, end here and now: tritonserver calls finalize() only when the last
        client has closed its stream, and until then these ranks would stand in the way of the next ones."""
        reason = self._deaths[-1] if self._deaths else "its ranks are dead or silent"
        with self._parting:
            if self._is_closing:
                # Nobody wants the model back, and a server that takes it down must not be asked to do so from inside.
                logger.warning("model %s lost its engine while it was unloaded: %s", self._model_name, reason)
                return
            logger.error("model %s lost its engine: %s", self._model_name, reason)
            if not is_supervised():
                logger.warning("model %s stays loaded and waits for its ranks to be relaunched", self._model_name)
                return
            give_up(self._pb_utils, self._model_name, reason)
        self._executor.shutdown()
        self._sending.finish()


def _refusal(error: Exception) -> tuple[str, str, str]:
    """(code, sentence, outcome). An error that is not meant for a person is logged, and its client hears no more."""
    if not isinstance(error, InflightError):
        log_failure("taking a request", error)
        error = InflightError("the request could not be read")
    return error.code, str(error), error.outcome
