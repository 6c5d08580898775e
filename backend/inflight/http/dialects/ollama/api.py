"""The paths of Ollama's API: chats, texts and embeddings; those of models beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from inflight.asking.ask import Ask
from inflight.asking.vectors import embedding_requests, unit_vectors
from inflight.http.api_error import APIError, in_words
from inflight.http.call import Call
from inflight.http.dialects.body import decode_body
from inflight.http.dialects.ollama.asks import OF_CHAT, WORDS, chat_ask, generate_ask
from inflight.http.dialects.ollama.fields import ChatBody, EmbedBody, GenerateBody
from inflight.http.dialects.ollama.models import OllamaModels
from inflight.http.dialects.ollama.rendering import rendering
from inflight.http.endpoint import Handler, send_json
from inflight.http.pooled_runner import OF_VECTORS
from inflight.http.rendering import Rendering
from inflight.http.service import Service
from inflight.lora import LoRARequest
from inflight.request import Request
from inflight.request_limits import RequestLimits

BodyT = TypeVar("BodyT", ChatBody, GenerateBody)


def in_ollamas_form(error: APIError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    return error.status, {"error": error.message}


class OllamaApi:
    def __init__(self, service: Service) -> None:
        self.error_form = in_ollamas_form
        self.below = ("/api",)
        self._service = service
        self._models = OllamaModels(service)

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/api/chat": {"POST": self._chat},
            "/api/generate": {"POST": self._generate},
            "/api/embed": {"POST": self._embed},
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
            if not has_prompt(body):  # an order to load the model
                piece = {"message": {"role": "assistant", "content": ""}} if has_messages else {"response": ""}
                made = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
                return await send_json(
                    send, {"model": model, "created_at": made, **piece, "done": True, "done_reason": "load"}
                )

            def build() -> tuple[Call, Rendering]:
                words = OF_CHAT if has_messages else WORDS
                call = self._service.builder.call(
                    ask_of(body, adapter), words, self._service.limits, model, id_prefix=""
                )
                return call, rendering(began, has_messages=has_messages)

            return await self._service.runner.run(build, tenant, scope, receive, send, num_bytes=len(data), began=began)

    async def _embed(self, scope: Scope, receive: Receive, send: Send) -> int:
        began = time.monotonic()
        with self._service.guard.admitted(scope) as tenant:
            data = await self._service.guard.read_body(scope, receive)
            body = decode_body(data, EmbedBody)
            model, adapter = self._models.find(body.model)

            def build() -> list[Request]:
                limits = self._service.limits
                texts = [body.input] if isinstance(body.input, str) else body.input
                before = self._service.text_prompts.chosen()
                texts = [before.text + text if text else text for text in texts]
                given = [text if body.truncate is False else self._cut(text, limits) for text in texts]
                return embedding_requests(
                    [*given], body.dimensions, self._service.served, limits, adapter, self._service.vector_of
                )

            rows, num_tokens = await self._service.pooled.run(
                build, tenant, receive, num_bytes=len(data), words=OF_VECTORS
            )
            return await send_json(
                send,
                {
                    "model": model,
                    "embeddings": [vector.tolist() for vector in unit_vectors(rows, body.dimensions)],
                    "total_duration": round((time.monotonic() - began) * 1e9),
                    "load_duration": 0,
                    "prompt_eval_count": num_tokens,
                },
            )

    def _cut(self, text: str, limits: RequestLimits) -> list[int]:
        """As many leading tokens of a text as the engine takes. Raises APIError."""
        most = limits.max_input_len
        if not limits.pooled:
            most = min(most, limits.max_seq_len - 1, limits.kv_cache_tokens)
        with in_words({"prompt": "input"}):
            return self._service.encoder.encode_beginning(text, limits, most)
