"""The backend behind model.py: accepts requests, and owns the threads that serve them.

    inflight-text-…    two threads that tokenise requests, short and long ones, and pass them to the engine
    inflight-metrics   the only thread that touches pb_utils' metrics
    inflight-send      the only thread that sends responses to requests which the engine has accepted
    inflight-watch     checks whether clients have disconnected and whether the engine is still there
    inflight-sign      the heartbeat that shows the supervisor that this process is alive

After `close` none of them touches pb_utils: tritonserver has freed the objects behind it by then.

A refused request is answered by the thread that refuses it, which is the only one that knows the request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from inflight.asking.images import Images
from inflight.checkpoint_digest import checkpoint_digest
from inflight.config import EngineConfig
from inflight.errors import EngineUnavailable, InflightError, InvalidRequest, QueueFull, RequestCancelled
from inflight.executor.front.front import SHUT_DOWN, Front
from inflight.metric_families import (
    ANSWERS_CHECKED,
    ANSWERS_FAILED,
    PAUSES,
    READY,
    RELAUNCHES,
    REPLAYS,
    REPLICA_READY,
    SPARES,
)
from inflight.open_requests import OpenRequests
from inflight.request import Request
from inflight.request_spans import RequestSpans
from inflight.result import Response
from inflight.server.batch_reply import BatchReply, PromptReply
from inflight.server.outcome import ended, refused
from inflight.server.preparation import Preparation
from inflight.server.read_limits import read_limits
from inflight.server.reply import Reply
from inflight.server.request_builder import RequestBuilder
from inflight.server.resumption import Resumption
from inflight.server.self_unload import is_supervised, unload_itself
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialect import Dialect
from inflight.server.tensors.request_parameters import REQUEST_TYPE, parse_parameters, read_parameters
from inflight.server.tensors.tensor_values import Array, split
from inflight.server.threads.metrics_thread import MetricsThread, Outcome, own_labels
from inflight.server.threads.response_pace import ResponsePace, choose_rate
from inflight.server.threads.sending_thread import SendingThread, log_failure
from inflight.server.threads.sign_thread import SignThread
from inflight.server.threads.tokenizing_threads import TokenizingThreads, text_length
from inflight.server.threads.vllm_metrics import vllm_families
from inflight.server.threads.watch_thread import WatchThread
from inflight.server.trace import ended_request, find_parent
from inflight.server.work_item import WorkItem
from inflight.server.work_items import WorkItems
from inflight.text.safe_text import safe_text
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""How long requests in flight may take to finish when the model is unloaded. tritonserver itself waits 30 s by
default."""


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
        is_unary: bool = False,
        is_attached: bool = False,
        spans: RequestSpans | None = None,
    ) -> None:
        """`instance`: tritonserver's name for this instance of the model. `deaths`: the list to which the executor
        appends why the engine died, newest last. `is_unary`: the model is not decoupled. `is_attached`: it uses
        another model's engine. `spans`: gets the requests that tritonserver traces, None = none."""
        self._deaths = deaths
        self._parting = threading.Lock()
        self._is_closing = False
        self._is_closed = False
        """The engine was shut down and will not come back: new and waiting requests are refused."""
        self._pb_utils = pb_utils
        self._executor = executor
        self._dialect = dialect
        self._is_unary = is_unary
        self._model_name = model_name
        self._spans = spans
        self._images = Images.of(config, tokenizer, lambda: executor.description.embedding_type)
        builder = RequestBuilder(tokenizer, executor.limits, executor.generation_defaults, self._images)
        folders = (config.gpt_model_path, config.tokenizer_dir)
        resumption = Resumption(checkpoint_digest(folders, executor.description), executor.limits)
        self._preparation = Preparation(tokenizer, builder, resumption, config.exclude_input_in_output, dialect.repeats)
        self._read_limits = read_limits(config, executor.limits, tokenizer)
        self._items = WorkItems()
        self._metrics = MetricsThread(
            pb_utils,
            own_labels(model_name, model_version),
            executor.description,
            config.stats_check_period_ms / 1000,
            executor.get_latest_batch_manager_stats,
            executor.num_requests_in_flight,
            executor.num_requests_queued,
            {} if is_attached else _of_own_engine(executor),
            executor.is_relaunching,
            {
                RELAUNCHES.name: executor.num_losses,
                PAUSES.name: executor.num_pauses,
                REPLAYS.name: executor.num_replays,
                ANSWERS_CHECKED.name: executor.num_answers_checked,
                ANSWERS_FAILED.name: executor.num_answers_failed,
            },
            vllm_families(executor.limits.max_seq_len) if dialect.has_vllm_metrics else None,
        )
        rate = choose_rate(config.max_responses_per_second, executor.description.device, len(os.sched_getaffinity(0)))
        self._tokenizing = TokenizingThreads[WorkItem](self._submit)
        self._sending = SendingThread(executor, self._items, ResponsePace(rate), self._on_end)
        self._watch = WatchThread(
            executor,
            self._items,
            config.cancellation_check_period_ms / 1000,
            self._on_engine_down,
            dialect.cancellation_log,
        )
        self._signs = SignThread(instance, lambda: not self._sending.has_failed)
        self._open_requests = OpenRequests(instance)

    def start(self) -> None:
        self._metrics.start()
        self._sending.start()
        self._tokenizing.start()
        self._watch.start()
        self._signs.start()

    def accept(self, request: Any) -> None:
        """Take one pb_utils.InferenceRequest. Never raises, and ensures that it gets exactly one final response."""
        try:
            sender = request.get_response_sender()
            reply = Reply(
                self._pb_utils,
                sender,
                is_unary=self._is_unary,
                open_requests=self._open_requests,
                uncoded=self._dialect.uncoded,
            )
        except Exception as error:
            log_failure("taking a request", error)
            self._count_refused(InflightError.outcome)
            return
        try:
            self._accept(request, reply)
        except Exception as error:
            self._refuse(error, reply)

    def is_ready(self) -> bool:
        return self._executor.is_ready() and self._sending.is_alive()

    def close(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Graceful shutdown: drain for at most `drain_seconds`, end the engine, join the threads. Every request gets
        its final response.

        No thread touches pb_utils afterwards, even if a part of the shutdown fails."""
        with self._parting:
            self._is_closing = True
        with contextlib.ExitStack() as ending:  # runs the callbacks in reverse order
            ending.callback(self._open_requests.close)
            if self._spans is not None:
                ending.callback(self._spans.close)
            ending.callback(self._metrics.stop)
            ending.callback(self._sending.stop)
            ending.callback(self._tokenizing.stop)
            ending.callback(self._images.close)
            ending.callback(self._refuse_all)
            ending.callback(self._executor.shutdown)
            ending.callback(self._watch.stop)
            ending.callback(self._signs.stop)
            self._drain(drain_seconds)

    def _drain(self, drain_seconds: float) -> None:
        # A relaunch may still succeed; an engine that is down answers nothing any more.
        may_answer = self._executor.is_ready() or self._executor.is_relaunching()
        if may_answer and not self._items.wait_until_empty(drain_seconds):
            logger.warning("%d requests are still in flight after %g s: ending them", len(self._items), drain_seconds)

    def _refuse_all(self) -> None:
        self._is_closed = True

    def _accept(self, request: Any, reply: Reply) -> None:
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = parse_parameters(request.parameters())
        common = read_parameters(parameters, request.timeout())
        wanted = self._dialect.wanted(request.requested_output_names())
        triton_id = str(request.request_id() or "")
        trace_parent = find_parent(request) if self._spans is not None else None
        prompts = split(arrays) if self._dialect.batched else (arrays,)
        if len(prompts) == 1:
            client = self._read(arrays, parameters, wanted, common)
            if client.stop:
                self._answer_stop(triton_id, reply)
                return
            self._items.check_free(triton_id)
            self._take(client, triton_id, wanted, trace_parent, reply)
            return
        self._items.check_free(triton_id)
        replies = BatchReply(reply, len(prompts), gathers=self._is_unary).prompts()
        for index, (rows, prompt_reply) in enumerate(zip(prompts, replies, strict=True)):
            # From the first one on the request has work items, so an error is that of one prompt.
            try:
                client = self._read(rows, parameters, wanted, {**common, "batch_index": index})
                self._take(client, triton_id, wanted, trace_parent, prompt_reply)
            except Exception as error:
                self._refuse(error, prompt_reply)

    def _take(
        self,
        client: ClientRequest,
        triton_id: str,
        wanted: frozenset[str] | None,
        trace_parent: Mapping[str, str] | None,
        reply: Reply | PromptReply,
    ) -> None:
        """Begin to serve a prompt."""
        if client.stop:
            raise InvalidRequest("stop stands in a request of its own, which has no other prompts")
        if client.stream and self._is_unary:
            raise InvalidRequest("Streaming is only supported in decoupled mode.")
        self._check_open()
        length = text_length(client)
        item = self._make_item(reply, client, triton_id, wanted, trace_parent)
        # From here on other threads may see the item, so nothing below may fail.
        self._metrics.count_accepted()
        self._items.add(item)
        self._tokenizing.put(item, length, has_images=bool(client.images))

    def _refuse(self, error: Exception, reply: Reply | PromptReply) -> None:
        code, sentence, outcome = refused(error)
        self._count_refused(outcome)
        reply.fail(code, sentence)

    def _count_refused(self, outcome: str) -> None:
        """A request without a work item: it has ended as it began."""
        self._metrics.count_accepted()
        self._metrics.record(Outcome(outcome=outcome))

    def _check_open(self) -> None:
        """Raise unless a request may be taken. The limit also counts requests that wait to be tokenised, which the
        engine does not know yet."""
        if self._is_closed:
            raise EngineUnavailable(SHUT_DOWN)
        limit = self._executor.max_in_flight
        if limit and self._executor.num_requests_in_flight() + self._tokenizing.num_waiting >= limit:
            raise QueueFull()

    def _submit(self, item: WorkItem) -> None:
        """On a tokenising thread: pass the item to the engine, or send its final response as an error."""
        try:
            if self._is_closed:
                raise EngineUnavailable(SHUT_DOWN)
            self._preparation.prepare(item)
            self._executor.enqueue_request(item.request)
        except Exception as error:
            # The sending thread may answer it too, if the engine is lost: the item ensures one final response.
            code, sentence, outcome = refused(error)
            # Released first, so that the client can use the id again once it has the response.
            self._items.release_triton_id(item)
            item.fail(code, sentence)
            if self._items.remove(item):
                self._metrics.record(Outcome(outcome=outcome))
                self._trace(item, code)
            return
        if item.is_cancelled or item.is_stopped:
            # Its client disconnected or stopped it before the engine knew the request.
            self._executor.cancel_request(item.request.request_id)

    def _read(
        self,
        arrays: Mapping[str, Array],
        parameters: Mapping[str, Any],
        wanted: frozenset[str] | None,
        common: Mapping[str, Any],
    ) -> ClientRequest:
        """`common`: fields of ClientRequest that no tensor sets."""
        client = self._dialect.read(arrays, self._read_limits, parameters)
        unset = {
            field: value for field, value in self._dialect.fields_for(wanted).items() if not getattr(client, field)
        }
        # Most requests have neither, and a copy takes longer than reading the tensors.
        client = replace(client, **common, **unset) if common or unset else client
        if client.is_context_only and "context_phase_params" not in self._dialect.outputs_by_name:
            raise InvalidRequest(
                f"{REQUEST_TYPE} {client.request_type.wire} needs a model with the output context_phase_params, and "
                "this one has none: use llm or tensorrt_llm"
            )
        return client

    def _answer_stop(self, triton_id: str, reply: Reply) -> None:
        self._stop(triton_id)
        if self._dialect.stop_error:
            reply.fail(RequestCancelled.code, self._dialect.stop_error)
        else:
            reply.close()

    def _stop(self, triton_id: str) -> None:
        if not triton_id:
            raise InvalidRequest("Cannot send stop request without specifying a request_id")
        items = self._items.with_triton_id(triton_id)
        if not items:
            if self._dialect.stops_unknown:
                return
            raise InvalidRequest(
                f"Received stop request for requestId {safe_text(triton_id)} but it's not active "
                "(might be completed already)."
            )
        for item in items:
            # Set before cancelling: the engine may not know a request that is being tokenised, and its thread reads the
            # flag after it has passed the request on.
            item.is_stopped = True
            self._executor.cancel_request(item.request.request_id)

    def _make_item(
        self,
        reply: Reply | PromptReply,
        client: ClientRequest,
        triton_id: str,
        wanted: frozenset[str] | None,
        trace_parent: Mapping[str, str] | None,
    ) -> WorkItem:
        return WorkItem(
            request=Request(
                request_id=self._executor.next_request_id(),
                input_token_ids=[],
                max_tokens=client.max_tokens or 1,  # an order to load an adapter has none
                client_id=triton_id,
            ),
            client=client,
            dialect=self._dialect,
            reply=reply,
            requested=wanted,
            gathers=self._is_unary or self._dialect.gathers(client),
            trace_parent=trace_parent,
        )

    def _on_end(self, item: WorkItem, last: Response) -> None:
        self._metrics.record(ended(item, last))
        self._trace(item, last.error_code if last.has_error and not item.is_completed else "")

    def _trace(self, item: WorkItem, error: str) -> None:
        if self._spans is not None and item.trace_parent is not None:
            self._spans.record(ended_request(item, item.trace_parent, self._model_name, error))

    def _on_engine_down(self) -> None:
        """Under a supervisor, which loads the model again, end the engine at once: tritonserver calls finalize() only
        when the last client has closed its stream, and until then these ranks would occupy what the next ones need."""
        reason = self._deaths[-1] if self._deaths else "its ranks are dead or silent"
        with self._parting:
            if self._is_closing:
                # The model is not to be loaded again, and a server that unloads it must not be asked to unload it.
                logger.warning("model %s lost its engine while it was unloaded: %s", self._model_name, reason)
                return
            logger.error("model %s lost its engine: %s", self._model_name, reason)
            if not is_supervised():
                logger.warning("model %s stays loaded and waits for its ranks to be relaunched", self._model_name)
                return
            unload_itself(self._pb_utils, self._model_name, reason)
        self._executor.shutdown()
        self._sending.finish()


def _of_own_engine(executor: Front) -> dict[str, Callable[[], Mapping[str, float]]]:
    """What the gauges of the engine's own model show."""
    return {
        READY.name: lambda: {"": executor.is_ready()},
        REPLICA_READY.name: lambda: {str(index): ready for index, ready in enumerate(executor.ready_replicas())},
        SPARES.name: lambda: {"": executor.num_spares()},
    }
