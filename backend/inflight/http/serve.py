"""The process of an OpenAI server: attaches to the engine's ranks, or launches them, listens, and ends after SIGTERM.

While an engine that another program has launched is away, requests are refused, and it is found again when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from starlette.types import ASGIApp

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, EngineUnavailable
from inflight.executor.executor import attach_executor, find_engine_config
from inflight.executor.front.remote import RemoteFront
from inflight.http.api_keys import ApiKeys
from inflight.http.app import App
from inflight.http.by_model import ByModel
from inflight.http.dialects.anthropic.api import MessagesApi
from inflight.http.dialects.cohere.api import CohereApi
from inflight.http.dialects.dialect import Dialect
from inflight.http.dialects.ollama.api import OllamaApi
from inflight.http.dialects.openai.api import OpenAIApi
from inflight.http.dialects.openai.responses.store import ResponseStore
from inflight.http.engine_front import make_front, open_front, with_statistics
from inflight.http.engine_metrics import AllEngines, EngineMetrics
from inflight.http.guard import Guard
from inflight.http.http_server import HttpServer
from inflight.http.metrics import ServerMetrics
from inflight.http.model import Model
from inflight.http.model_engine import ModelEngine
from inflight.http.page.feed import BatchFeed
from inflight.http.rate_limit import RateLimit
from inflight.http.room import Room
from inflight.http.service import Service
from inflight.http.text_threads import TextThreads
from inflight.openai_options import OpenAIOptions
from inflight.request_spans import open_spans

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 128 * 1024
"""Of each connection, which the kernel doubles. It would take 4 MiB of text that a client does not read, and with
hundreds of such clients the kernel's memory for all connections of the machine."""
UNREAD_MS = 120_000
"""For which a client may take nothing of what waits for it; then its connection is closed."""

WATCHED_ITERATIONS = 1000
"""Whose statistics are kept for the page until they become an event."""

GC_THRESHOLDS = (20_000, 5, 5)
"""Every response of the engine is a few objects that live for a moment: with Python's own thresholds, a third of a
streamed token's time went into looking for cycles among them. The older generations hold what is left of requests that
were open at an earlier collection: with 50 and 100 here, the process grew by 3 MB a minute at 20 requests a second."""


def serve(options: OpenAIOptions, front: RemoteFront | None = None, *, tells_absence: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. `front`: of the first model, from `open_front`; None = it is opened here.
    `tells_absence`: say so if the engine has to be waited for. Raises ConfigurationError if something is missing or
    wrong, or if an engine is not found in time."""
    front = front or open_front(options)
    try:
        models = [Model(each, EngineConfig.from_parameters(each.parameters)) for each in options.of_each()]
        server = OpenAIServer(options, models)
        with listen(options.host, options.port) as listener:
            config = models[0].config
            if tells_absence:
                tell_absence(options.engine, config.worker_start_timeout_ms / 1000)
            if not options.models:
                front.start()
                if options.launches_ranks:
                    logger.info("engine %s: %s", options.engine, front.description.summary(front.limits))
            engines = make_engines(options, front)
            loop = new_loop()
            calm_gc()
            try:
                loop.run_until_complete(server.run(engines, listener, partial(announce, tools=server.tools_note)))
            finally:
                loop.close()
    finally:
        front.shutdown()


def make_engines(options: OpenAIOptions, front: RemoteFront) -> list[ModelEngine]:
    """Of each model. `front`: of the first one, started if that is the only one. The others that are not loaded on
    demand begin to load."""
    engines = []
    for index, each in enumerate(options.of_each()):
        config = EngineConfig.from_parameters(each.parameters)
        own = options.models[index] if options.models else None
        # Statistics are for a front of their own, while somebody reads them.
        attach = partial(attach_executor, with_statistics(config, WATCHED_ITERATIONS), each.engine)
        engines.append(
            ModelEngine(
                each.engine,
                partial(make_front, each),
                attach,
                is_on_demand=own is not None and own.is_on_demand,
                keep_seconds=options.unload_after_seconds or math.inf,
                front=None if index else front,
                is_loaded=own is None,
            )
        )
    for engine in engines[1:]:
        engine.begin()
    return engines


def tell_absence(engine: str, seconds: float) -> None:
    """Say for how long it is waited for, if no such engine serves yet."""
    try:
        find_engine_config(engine, 0.0)
    except ConfigurationError as absent:
        print(f"inflight: {absent}; waiting for it, {seconds:.0f} s at most", file=sys.stderr, flush=True)


def announce(address: str, *, tools: str) -> None:
    """`tools`: what there is to say of them, "" = nothing."""
    for note in filter(None, (f"OpenAI API on http://{address}/v1", tools)):
        print(f"inflight: {note}", file=sys.stderr, flush=True)


class OpenAIServer:
    """Everything of the server that does not depend on the engines, read and checked before they are needed."""

    def __init__(self, options: OpenAIOptions, models: Sequence[Model]) -> None:
        """`models`: those of `options`. Raises ConfigurationError."""
        self._options = options
        self._models = models
        notes = {each.options.engine: each.tools_note for each in models if each.tools_note}
        self.tools_note = "; ".join(note if len(models) == 1 else f"{name}: {note}" for name, note in notes.items())
        self._spans = open_spans(models[0].config.otlp_traces_endpoint, is_outermost=True)
        self._guard = Guard(
            ApiKeys.load(options.api_key_file),
            RateLimit(options.max_requests_per_second),
            max_open_requests=options.max_open_requests,
            max_body_bytes=options.max_body_bytes,
        )

    async def run(
        self,
        engines: Sequence[ModelEngine],
        listener: socket.socket,
        ready: Callable[[str], None],
        stop: asyncio.Event | None = None,
    ) -> None:
        """Serve the models, whose `engines` these are, until a signal, or until `stop` is set. `ready` is called with
        host:port once all are loaded that are not loaded on demand. Raises ConfigurationError if one of them fails."""
        loop = asyncio.get_running_loop()
        room = Room(engines, {each.options.engine: each.needs for each in self._models})
        for engine, model in zip(engines, self._models, strict=True):
            engine.open(loop, room.held, model.rest)
        threads, feeds = TextThreads(), {engine.name: BatchFeed(engine.attach) for engine in engines}
        stop, hurry = stop or asyncio.Event(), asyncio.Event()
        try:
            server = HttpServer(
                self.make_app(engines, threads, feeds),
                max_connections=self._options.max_connections,
                max_connections_per_address=self._options.max_connections_per_address,
            )
            await server.listen(listener)
            hear_signals(stop, hurry)
            loading = asyncio.create_task(self._load(engines, listener, ready, stop))
            await stop.wait()
            await server.drain(max(round(self._options.drain_seconds), 1), hurry)
            if not loading.cancel():
                loading.result()
        finally:
            for feed in feeds.values():
                feed.stop()
            await asyncio.gather(*(engine.close() for engine in engines))
            threads.stop()
            for model in self._models:
                if model.images is not None:
                    model.images.close()
            if self._spans is not None:
                self._spans.close()

    async def _load(
        self,
        engines: Sequence[ModelEngine],
        listener: socket.socket,
        ready: Callable[[str], None],
        stop: asyncio.Event,
    ) -> None:
        """Load what is not loaded on demand, side by side. Where one fails, `stop` is set."""
        try:
            await asyncio.gather(*(engine.load() for engine in engines if not engine.is_on_demand))
        except EngineUnavailable as error:
            stop.set()
            raise ConfigurationError(str(error)) from None
        host, port = listener.getsockname()[:2]
        ready(f"{host}:{port}")

    def make_app(self, engines: Sequence[ModelEngine], threads: TextThreads, feeds: Mapping[str, BatchFeed]) -> ASGIApp:
        is_launched_here = self._options.launches_ranks
        shown = [EngineMetrics(each.find_front, each.name, is_launched_here=is_launched_here) for each in engines]
        metrics = ServerMetrics(AllEngines(shown))
        names = [each.options.model_names for each in self._models]
        services: list[Service] = []
        for index, (model, engine) in enumerate(zip(self._models, engines, strict=True)):
            others = [name for other, those in enumerate(names) if other != index for name in those]
            counts = metrics.of_model(engine.name)
            service = model.service(engine, threads, counts, self._guard, self._spans, others)
            services.append(dataclasses.replace(service, all_models=services))
            if model.images is not None and not engine.is_on_demand:
                model.images.start()
        store = ResponseStore(self._options.max_stored_responses, self._options.max_stored_response_bytes)
        of_models = [self._dialects(service, store) for service in services]
        dialects: Sequence[Dialect] = of_models[0]
        if len(engines) > 1 or engines[0].is_on_demand:
            dialects = [ByModel(each, services, engines, self._guard) for each in zip(*of_models, strict=True)]
        return App(dialects, engines=engines, guard=self._guard, metrics=metrics, feeds=feeds).routes()

    def _dialects(self, service: Service, store: ResponseStore) -> list[Dialect]:
        return [
            OpenAIApi(service, store, allows_lora_updates=self._options.allow_lora_updates),
            MessagesApi(service),
            OllamaApi(service),
            CohereApi(service),
        ]


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, closed when the context ends. Raises ConfigurationError."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"{host}:{port} is not an address to listen on: {error}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # The connections have what their listener has.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        try:
            listener.bind(where)
        except OSError as error:
            raise ConfigurationError(
                f"the OpenAI port {port} on {host} cannot be listened on: {error.strerror}"
            ) from None
        yield listener


def hear_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`; another SIGINT behind that sets `hurry`. Nothing happens on any thread but the
    main one, which alone hears them."""
    if threading.current_thread() is not threading.main_thread():
        return

    def interrupt() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # where it has no wheel
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def calm_gc() -> None:
    """Of this process, once everything is loaded: that stays as long as the process does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
