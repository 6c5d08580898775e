"""The paths of Ollama's API: chats, texts and embeddings; those of models beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from inflight.asking.ask import Ask, Prompt
from inflight.asking.refusal import Words
from inflight.asking.vectors import Row, cut_at_end, embedding_requests, unit_vectors
from inflight.http.api_error import APIError, unsupported
from inflight.http.call import Call
from inflight.http.dialects.body import decode_body
from inflight.http.dialects.ollama.asks import OF_CHAT, WORDS, chat_ask, generate_ask
from inflight.http.dialects.ollama.fields import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody
from inflight.http.dialects.ollama.keep_alive import KeepAlive, read_keep_alive
from inflight.http.dialects.ollama.models import LATEST, OllamaModels
from inflight.http.dialects.ollama.rendering import rendering
from inflight.http.endpoint import Handler, send_json
from inflight.http.pooled_runner import OF_VECTORS
from inflight.http.rendering import Rendering
from inflight.http.service import Service
from inflight.lora import LoRARequest
from inflight.request import Request

BodyT = TypeVar("BodyT", ChatBody, GenerateBody)


def in_ollamas_form(error: APIError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    return error.status, {"error": error.message}


class OllamaApi:
    def __init__(self, service: Service) -> None:
        self.error_form = in_ollamas_form
        self.below = ("/api",)
        self.loads_itself = frozenset(("/api/chat", "/api/generate", "/api/show"))
        self.name_tag = LATEST
        self._service = service
        self._models = OllamaModels(service)

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/api/chat": {"POST": self._chat},
            "/api/generate": {"POST": self._generate},
            "/api/embed": {"POST": self._embed},
            "/api/embeddings": {"POST": self._embed_one},
            **self._models.paths(),
        }

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> int:
        def ask(body: ChatBody, adapter: LoRARequest | None) -> Ask:
            return chat_ask(body, self._service.served.chats, adapter)

        return await self._answer(scope, receive, send, ChatBody, ask, lambda body: bool(body.messages))

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> int:
        def ask(body: GenerateBody, adapter: LoRARequest | None) -> Ask:
            return generate_ask(body, self._service.served.chats, adapter)

        return await self._answer(scope, receive, send, GenerateBody, ask, lambda body: bool(body.prompt))

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        kind: type[BodyT],
        ask_of: Callable[[BodyT, LoRARequest | None], Ask],
        has_prompt: Callable[[BodyT], bool],
    ) -> int:
        began, has_messages = time.monotonic(), kind is ChatBody
        with self._service.guard.admitted(scope) as tenant:
            data = await self._service.guard.read_body(scope, receive)
            body = decode_body(data, kind)
            model, adapter = self._models.find(body.model)
            if not has_prompt(body):
                piece = {"message": {"role": "assistant", "content": ""}} if has_messages else {"response": ""}
                reason = await self._order(body.keep_alive)
                made = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
                return await send_json(
                    send, {"model": model, "created_at": made, **piece, "done": True, "done_reason": reason}
                )
            keep_seconds, load_seconds = read_keep_alive(body.keep_alive), 0.0

            def build() -> tuple[Call, Rendering]:
                words = OF_CHAT if has_messages else WORDS
                call = self._service.builder.call(
                    ask_of(body, adapter), words, self._service.limits, model, id_prefix=""
                )
                return call, rendering(began, load_seconds, has_messages=has_messages)

            asked = time.monotonic()
            async with self._service.engine.in_use():
                load_seconds = time.monotonic() - asked
                self._keep(keep_seconds)
                return await self._service.runner.run(
                    build, tenant, scope, receive, send, num_bytes=len(data), began=began
                )

    async def _order(self, keep_alive: KeepAlive) -> str:
        """Without a prompt it is an order to load the model, or to unload it. Returns which. Raises APIError and
        EngineUnavailable."""
        engine, seconds = self._service.engine, read_keep_alive(keep_alive)
        if seconds != 0:
            async with engine.in_use():
                self._keep(seconds)
            return "load"
        if not engine.is_on_demand:
            raise unsupported("keep_alive", f"the model {engine.name} stays loaded on this server")
        engine.keep(0)
        return "unload"

    def _keep(self, seconds: float | None) -> None:
        """`seconds`: None = as before. Models that are not loaded on demand stay loaded, whatever clients want."""
        if seconds is not None:
            self._service.engine.keep(seconds)

    async def _embed(self, scope: Scope, receive: Receive, send: Send) -> int:
        began = time.monotonic()
        with self._service.guard.admitted(scope) as tenant:
            data = await self._service.guard.read_body(scope, receive)
            body = decode_body(data, EmbedBody)
            model, _ = self._models.find(body.model)
            self._keep(read_keep_alive(body.keep_alive))
            vectors, num_tokens = await self._vectors(body, tenant, receive, OF_VECTORS)
            return await send_json(
                send,
                {
                    "model": model,
                    "embeddings": [vector.tolist() for vector in vectors],
                    "total_duration": round((time.monotonic() - began) * 1e9),
                    "load_duration": 0,
                    "prompt_eval_count": num_tokens,
                },
            )

    async def _embed_one(self, scope: Scope, receive: Receive, send: Send) -> int:
        """What older clients call."""
        with self._service.guard.admitted(scope) as tenant:
            body = decode_body(await self._service.guard.read_body(scope, receive), EmbeddingsBody)
            self._models.find(body.model)
            self._keep(read_keep_alive(body.keep_alive))
            if not body.prompt:  # an order to load the model
                return await send_json(send, {"embedding": []})
            asked = EmbedBody(model=body.model, input=body.prompt)
            (vector,), _ = await self._vectors(asked, tenant, receive, {**OF_VECTORS, "prompt": "prompt"})
            return await send_json(send, {"embedding": vector.tolist()})

    async def _vectors(self, body: EmbedBody, tenant: int, receive: Receive, words: Words) -> tuple[list[Row], int]:
        """Of each text, and the tokens of all. Raises APIError and ClientGone."""
        service = self._service
        _, adapter = self._models.find(body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input

        def build() -> list[Request]:
            limits, before = service.limits, service.text_prompts.chosen()
            given: list[Prompt] = []
            for text in texts:
                text = before.text + text if text else text
                given.append(text if body.truncate is False else cut_at_end(text, service.encoder, limits))
            return embedding_requests(
                given, body.dimensions, service.served, limits, adapter, service.vector_of, begin_with=before
            )

        num_bytes = sum(map(len, texts))
        rows, num_tokens = await service.pooled.run(build, tenant, receive, num_bytes=num_bytes, words=words)
        return unit_vectors(rows, body.dimensions), num_tokens
