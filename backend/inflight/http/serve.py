"""The process of an OpenAI server: attaches to the engine's ranks, or launches them, listens, and ends after SIGTERM.

While an engine that another program has launched is away, requests are refused, and it is found again when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from inflight.asking.chat_renderer import ChatRenderer
from inflight.asking.chat_template import ChatTemplate
from inflight.asking.chats import Chats
from inflight.asking.pair_template import find_pair_template
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.sentence_files import find_activation, find_pooling, find_prompts
from inflight.asking.served import Served
from inflight.asking.tool_use import choose_reasoning_parser, choose_tool_parser
from inflight.checkpoint_digest import system_fingerprint
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.executor import attach_executor, find_engine_config
from inflight.executor.front.front import Front
from inflight.executor.front.remote import RemoteFront
from inflight.http.api_keys import ApiKeys
from inflight.http.app import App
from inflight.http.call_builder import CallBuilder
from inflight.http.call_runner import CallRunner
from inflight.http.checkpoint_facts import CheckpointFacts
from inflight.http.dialects.anthropic.api import MessagesApi
from inflight.http.dialects.cohere.api import CohereApi
from inflight.http.dialects.dialect import Dialect
from inflight.http.dialects.ollama.api import OllamaApi
from inflight.http.dialects.openai.api import OpenAIApi
from inflight.http.dialects.openai.responses.store import ResponseStore
from inflight.http.dispatcher import Dispatcher
from inflight.http.engine_front import open_front, with_statistics
from inflight.http.engine_metrics import EngineMetrics
from inflight.http.guard import Guard
from inflight.http.http_server import HttpServer
from inflight.http.metrics import ServerMetrics
from inflight.http.model_names import ModelNames
from inflight.http.page.feed import BatchFeed
from inflight.http.pooled_runner import PooledRunner
from inflight.http.rate_limit import RateLimit
from inflight.http.service import Service
from inflight.http.text_threads import TextThreads
from inflight.openai_options import OpenAIOptions
from inflight.request_spans import open_spans
from inflight.text.tokenizer import Tokenizer

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
    """Serve until SIGTERM or SIGINT. `front`: from `open_front`; None = it is opened here. `tells_absence`: say so if
    the engine has to be waited for. Raises ConfigurationError if something is missing or wrong, or if the engine is not
    found in time."""
    front = front or open_front(options)
    config = EngineConfig.from_parameters(options.parameters)
    try:
        server = OpenAIServer(options, config)
        with listen(options.host, options.port) as listener:
            if tells_absence:
                tell_absence(options.engine, config.worker_start_timeout_ms / 1000)
            front.start()
            if options.launches_ranks:
                logger.info("engine %s: %s", options.engine, front.description.summary(front.limits))
            # Statistics are for a front of their own, while somebody reads them.
            attach = partial(attach_executor, with_statistics(config, WATCHED_ITERATIONS), options.engine)
            loop = new_loop()
            calm_gc()
            try:
                loop.run_until_complete(server.run(front, attach, listener, partial(announce, tools=server.tools_note)))
            finally:
                loop.close()
    finally:
        front.shutdown()


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
    """Everything of the server that does not depend on the engine, read and checked before it is needed."""

    def __init__(self, options: OpenAIOptions, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer`: None = the checkpoint's. Raises ConfigurationError."""
        folder = config.tokenizer_dir or config.gpt_model_path
        self._options = options
        self._config = config
        self._tokenizer = tokenizer or Tokenizer.load(folder, config.gpt_model_path)
        self._encoder = PromptEncoder(self._tokenizer, config.max_text_bytes, find_pair_template(config))
        self._renderer = ChatRenderer(ChatTemplate.load(Path(folder)), frozenset(options.chat_template_kwargs))
        self._checkpoint = CheckpointFacts.read(Path(config.gpt_model_path))
        self._tool_parser, self.tools_note = choose_tool_parser(
            options.tool_parser,
            self._renderer.tool_families,
            knows_tools=self._renderer.knows_tools,
            model_type=self._checkpoint.model_type,
        )
        self._reasoning_parser = choose_reasoning_parser(options.reasoning_parser, self._tool_parser)
        checkpoint, pooling = Path(config.gpt_model_path), options.embedding_pooling
        self._vector_of = pooling or find_pooling(checkpoint)
        self._score_of = find_activation(checkpoint)
        self._text_prompts = find_prompts(checkpoint, is_pooling_set=bool(pooling))
        self._spans = open_spans(config.otlp_traces_endpoint, is_outermost=True)
        self._guard = Guard(
            ApiKeys.load(options.api_key_file),
            RateLimit(options.max_requests_per_second),
            max_open_requests=options.max_open_requests,
            max_body_bytes=options.max_body_bytes,
        )

    async def run(
        self,
        front: Front,
        attach: Callable[[], Front],
        listener: socket.socket,
        ready: Callable[[str], None],
        stop: asyncio.Event | None = None,
    ) -> None:
        """Serve the started `front` until a signal, or until `stop` is set. `attach` makes another front of the same
        engine, which keeps statistics; `ready` is called with host:port once connections are taken."""
        dispatcher = Dispatcher(front, asyncio.get_running_loop())
        threads, feed = TextThreads(), BatchFeed(attach)
        dispatcher.start()
        stop, hurry = stop or asyncio.Event(), asyncio.Event()
        try:
            server = HttpServer(
                self.make_app(front, dispatcher, threads, feed),
                max_connections=self._options.max_connections,
                max_connections_per_address=self._options.max_connections_per_address,
            )
            await server.listen(listener)
            host, port = listener.getsockname()[:2]
            ready(f"{host}:{port}")
            hear_signals(stop, hurry)
            await stop.wait()
            await server.drain(max(round(self._options.drain_seconds), 1), hurry)
        finally:
            feed.stop()
            front.shutdown()
            threads.stop()
            if self._spans is not None:
                self._spans.close()

    def make_app(self, front: Front, dispatcher: Dispatcher, threads: TextThreads, feed: BatchFeed) -> ASGIApp:
        options, config = self._options, self._config
        folders = (config.gpt_model_path, config.tokenizer_dir)
        chats = Chats(
            self._tokenizer,
            self._encoder,
            self._renderer,
            tool_parser=self._tool_parser,
            reasoning_parser=self._reasoning_parser,
            check_text=front.check_text if config.guided_decoding_check else None,
        )
        seconds = options.max_request_seconds
        served = Served(self._tokenizer, front.generation_defaults, self._encoder, chats, max_request_seconds=seconds)
        metrics = ServerMetrics(EngineMetrics(front, options.engine, is_launched_here=options.launches_ranks))

        def fingerprint() -> str:
            return system_fingerprint(folders, front.description)

        service = Service(
            front=front,
            dispatcher=dispatcher,
            builder=CallBuilder(served, self._tokenizer, fingerprint),
            runner=CallRunner(dispatcher, threads, metrics, self._spans),
            pooled=PooledRunner(dispatcher, threads, metrics),
            encoder=self._encoder,
            tokenizer=self._tokenizer,
            names=ModelNames(options.model_names, config.gpt_model_path, config.lora_dir),
            guard=self._guard,
            threads=threads,
            checkpoint=self._checkpoint,
            fingerprint=fingerprint,
            vector_of=self._vector_of,
            score_of=self._score_of,
            text_prompts=self._text_prompts,
        )
        store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
        dialects: list[Dialect] = [
            OpenAIApi(service, store, allows_lora_updates=options.allow_lora_updates),
            MessagesApi(service),
            OllamaApi(service),
            CohereApi(service),
        ]
        return App(dialects, front=front, guard=self._guard, metrics=metrics, feed=feed).routes()


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
