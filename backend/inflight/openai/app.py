"""The paths of the server and what answers them.

Bodies are decoded here, and become calls on the text threads; `respond` sends the answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.tool_use import check_tools
from inflight.errors import EngineUnavailable
from inflight.executor.front.front import NOT_AVAILABLE, Front
from inflight.lora import LoRARequest
from inflight.openai.anthropic.api import MessagesApi
from inflight.openai.anthropic.errors import in_anthropics_form
from inflight.openai.api_error import APIError, in_words, invalid, of_response
from inflight.openai.asks import OF_CHAT, chat_of
from inflight.openai.call import Call
from inflight.openai.call_builder import CallBuilder
from inflight.openai.call_runner import CallRunner
from inflight.openai.dispatcher import Dispatcher, Mailbox
from inflight.openai.embedding_runner import EmbeddingRunner
from inflight.openai.embeddings import EmbeddingBody, answer, embedding_requests
from inflight.openai.endpoint import Endpoint, ErrorForm, Handler, send_bytes, send_json
from inflight.openai.fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
    decode_body,
)
from inflight.openai.guard import Guard
from inflight.openai.http import endless_stream
from inflight.openai.metrics import CONTENT_TYPE, ServerMetrics
from inflight.openai.model_names import ModelNames
from inflight.openai.ollama.api import OllamaApi, in_ollamas_form
from inflight.openai.page.feed import BatchFeed
from inflight.openai.page.index import HEADERS, INDEX
from inflight.openai.rendering import COMPLETIONS
from inflight.openai.respond import STREAM_HEADERS
from inflight.openai.responses.api import ResponsesApi
from inflight.openai.responses.store import ResponseStore
from inflight.openai.sentence_files import VectorOf
from inflight.openai.text_threads import TextThreads
from inflight.request import Request
from inflight.request_spans import RequestSpans
from inflight.text.text_decoder import make_text_decoder
from inflight.text.tokenizer import Tokenizer

T = TypeVar("T")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
MAX_DETOKENIZED = 2**20
"""Tokens of one body of /detokenize."""


class App:
    """Every path, over one front."""

    def __init__(
        self,
        *,
        front: Front,
        dispatcher: Dispatcher,
        builder: CallBuilder,
        encoder: PromptEncoder,
        tokenizer: Tokenizer,
        names: ModelNames,
        guard: Guard,
        metrics: ServerMetrics,
        threads: TextThreads,
        feed: BatchFeed,
        store: ResponseStore,
        allows_lora_updates: bool = False,
        vector_of: VectorOf = "mean",
        spans: RequestSpans | None = None,
    ) -> None:
        self._front = front
        self._dispatcher = dispatcher
        self._builder = builder
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._names = names
        self._guard = guard
        self._metrics = metrics
        self._threads = threads
        self._runner = CallRunner(dispatcher, threads, metrics, spans)
        self._embedder = EmbeddingRunner(dispatcher, threads, metrics)
        self._feed = feed
        self._responses = ResponsesApi(
            front=front,
            builder=builder,
            runner=self._runner,
            names=names,
            guard=guard,
            store=store,
            threads=threads,
        )
        self._messages = MessagesApi(
            front=front, builder=builder, runner=self._runner, names=names, guard=guard, threads=threads
        )
        self._ollama = OllamaApi(
            front=front,
            builder=builder,
            runner=self._runner,
            embedder=self._embedder,
            encoder=encoder,
            names=names,
            guard=guard,
            vector_of=vector_of,
        )
        self._allows_lora_updates = allows_lora_updates
        self._vector_of = vector_of

    def routes(self) -> ASGIApp:
        paths: dict[str, dict[str, Handler]] = {
            "/v1/models": _read(self._models),
            "/v1/models/{id:path}": _read(self._model),
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat_completions},
            **self._responses.paths(),
            "/v1/embeddings": {"POST": self._embeddings},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
            "/": _read(self._page),
            "/events": {"GET": self._events},
            "/health": _read(self._health),
            "/health/ready": _read(self._health),
            "/metrics": _read(self._metrics_text),
        }
        forms: dict[str, ErrorForm] = dict.fromkeys(self._messages.paths(), in_anthropics_form)
        forms |= dict.fromkeys(self._ollama.paths(), in_ollamas_form)
        routes = [
            Route(path, Endpoint(path, methods, self._metrics, forms.get(path)))
            for path, methods in {**paths, **self._messages.paths(), **self._ollama.paths()}.items()
        ]
        every = dict.fromkeys(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"), self._unknown_path)
        return Router(routes, redirect_slashes=False, default=Endpoint("other", every, self._metrics))

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await self._generate(scope, receive, send, CompletionBody, self._builder.completion)

    async def _chat_completions(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await self._generate(scope, receive, send, ChatBody, self._builder.chat)

    async def _generate(
        self, scope: Scope, receive: Receive, send: Send, kind: type[T], build: Callable[..., Call]
    ) -> int:
        began = time.monotonic()
        with self._guard.admitted(scope) as tenant:
            data = await self._guard.read_body(scope, receive)
            body: Any = decode_body(data, kind)
            model, adapter = self._names.find(body.model)
            return await self._runner.run(
                lambda: (build(body, self._front.limits, model, adapter), COMPLETIONS),
                tenant,
                scope,
                receive,
                send,
                num_bytes=len(data),
                began=began,
            )

    async def _embeddings(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._guard.admitted(scope) as tenant:
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, EmbeddingBody)
            model, adapter = self._names.find(body.model)

            def build() -> list[Request]:
                return embedding_requests(body, self._builder.served, self._front.limits, adapter, self._vector_of)

            vectors, num_tokens = await self._embedder.run(
                build, tenant, receive, num_bytes=len(data), dimensions=body.dimensions
            )
            return await send_json(send, answer(vectors, model, body.encoding_format, num_tokens))

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._guard.admitted(scope):
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, TokenizeBody)
            self._names.find(body.model)
            ids = await self._threads.run(len(data), lambda: self._tokens_of(body))
            texts = [self._tokenizer.token(token) or "" for token in ids] if body.return_token_strs else None
            limit = self._front.limits.max_seq_len
            return await send_json(
                send, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}
            )

    def _tokens_of(self, body: TokenizeBody) -> list[int]:
        limits = self._front.limits
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give prompt or messages, one of the two", "prompt")
        if body.messages is None:
            assert body.prompt is not None
            added = body.add_special_tokens is not False
            with in_words({}):
                return self._encoder.encode(body.prompt, limits, add_special_tokens=added) if body.prompt else []
        chat = chat_of(body)
        with in_words(OF_CHAT):
            check_tools(chat.tools or [])
            return self._builder.served.chats.encode(chat, limits)[1]

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._guard.admitted(scope):
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, DetokenizeBody)
            self._names.find(body.model)
            return await send_json(send, {"prompt": await self._threads.run(len(data), lambda: self._text_of(body))})

    def _text_of(self, body: DetokenizeBody) -> str:
        size = self._front.limits.vocab_size
        if len(body.tokens) > MAX_DETOKENIZED or not all(0 <= token < size for token in body.tokens):
            raise invalid(f"tokens must be at most {MAX_DETOKENIZED} token ids from 0 to {size - 1}", "tokens")
        decoder = make_text_decoder(self._tokenizer, [], shows_special=True)
        return "".join(map(decoder.push, body.tokens)) + decoder.flush()

    # -- models --------------------------------------------------------------------------------------------------------

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        return await send_json(send, {"object": "list", "data": self._cards()})

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        name, _ = self._names.find(scope["path_params"]["id"])
        return await send_json(send, next(card for card in self._cards() if card["id"] == name))

    def _cards(self) -> list[dict[str, Any]]:
        return self._names.cards(self._front.limits.max_seq_len)

    async def _load_adapter(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._guard.admitted(scope):
            self._check_lora_updates()
            body = decode_body(await self._guard.read_body(scope, receive), LoadAdapterBody)
            adapter = LoRARequest(body.lora_name, 0, body.lora_path)
            replaces = bool(body.load_inplace) and self._names.is_loaded(body.lora_name)
            if not replaces:
                self._names.check_free(body.lora_name)
            if not os.path.isdir(body.lora_path):  # unlike Path.is_dir, false for a path that is too long
                raise APIError(404, "lora_path is no folder of this machine", param="lora_path")
            if replaces:
                await self._order(LoRARequest(body.lora_name), "unload")
            await self._order(adapter, "load")
            self._names.add(adapter)
            text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
            return await send_bytes(send, text.encode(), "text/plain; charset=utf-8")

    async def _unload_adapter(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._guard.admitted(scope):
            self._check_lora_updates()
            body = decode_body(await self._guard.read_body(scope, receive), UnloadAdapterBody)
            if not self._names.is_loaded(body.lora_name):
                raise APIError(404, "no adapter of this name was loaded here", param="lora_name")
            self._names.remove(body.lora_name)
            await self._order(LoRARequest(body.lora_name), "unload")
            text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
            return await send_bytes(send, text.encode(), "text/plain; charset=utf-8")

    def _check_lora_updates(self) -> None:
        if not self._allows_lora_updates:
            raise APIError(403, "the operator of this server does not allow to load or unload adapters")

    async def _order(self, adapter: LoRARequest, order: str) -> None:
        """Wait until the engine has loaded or forgotten an adapter. Raises APIError; it is no error to forget one that
        the engine has dropped already."""
        kind: Any = order
        request = Request(input_token_ids=[], max_tokens=1, lora_request=adapter, lora_order=kind)
        mailbox = Mailbox(self._dispatcher, tenant=0)
        try:
            mailbox.send([request])
            (response,) = await mailbox.take()
        finally:
            mailbox.close()
        if response.result is None and order == "load":
            raise of_response(response)

    # -- the server itself ---------------------------------------------------------------------------------------------

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await send_bytes(send, b"", "text/plain", 200 if self._front.is_ready() else 503)

    async def _metrics_text(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        return await send_bytes(send, self._metrics.text(self._front.description), CONTENT_TYPE)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> int:
        # Without a key, which only the page itself can ask for: it is the same for everybody.
        return await send_bytes(send, INDEX, "text/html; charset=utf-8", headers=HEADERS)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        if not self._front.is_ready():
            raise EngineUnavailable(NOT_AVAILABLE)
        with self._feed.viewing() as join:
            await send({"type": "http.response.start", "status": 200, "headers": [EVENTS, *STREAM_HEADERS]})
            connection = endless_stream(scope)
            connection.write_chunk(b": the batch\n\n")
            join(connection)
            while (await receive())["type"] != "http.disconnect":
                continue
        return 200

    async def _unknown_path(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        raise APIError(404, "this server has no such path")


def _read(handler: Handler) -> dict[str, Handler]:
    """Methods of a path that is only read. uvicorn sends no body as the answer to HEAD."""
    return {"GET": handler, "HEAD": handler}
