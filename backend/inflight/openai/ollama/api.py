"""The paths of Ollama's API: chats, texts, embeddings, and the list of models."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from inflight.asking.ask import Ask
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.executor.front.front import Front
from inflight.lora import LoRARequest
from inflight.openai.api_error import APIError, in_words
from inflight.openai.call import Call
from inflight.openai.call_builder import CallBuilder
from inflight.openai.call_runner import CallRunner
from inflight.openai.embedding_runner import EmbeddingRunner
from inflight.openai.embeddings import EmbeddingBody, embedding_requests
from inflight.openai.endpoint import Handler, send_json
from inflight.openai.fields import decode_body
from inflight.openai.guard import Guard
from inflight.openai.model_names import ModelNames
from inflight.openai.ollama.asks import OF_CHAT, WORDS, chat_ask, generate_ask
from inflight.openai.ollama.fields import ChatBody, EmbedBody, GenerateBody
from inflight.openai.ollama.rendering import rendering
from inflight.openai.rendering import Rendering
from inflight.openai.sentence_files import VectorOf
from inflight.request import Request
from inflight.request_limits import RequestLimits

BodyT = TypeVar("BodyT", ChatBody, GenerateBody)
LATEST = ":latest"
"""The tag that clients add to names without one."""


def in_ollamas_form(error: APIError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    return error.status, {"error": error.message}


class OllamaApi:
    def __init__(
        self,
        *,
        front: Front,
        builder: CallBuilder,
        runner: CallRunner,
        embedder: EmbeddingRunner,
        encoder: PromptEncoder,
        names: ModelNames,
        guard: Guard,
        vector_of: VectorOf,
    ) -> None:
        """`vector_of`: how embeddings are made."""
        self._front = front
        self._builder = builder
        self._runner = runner
        self._embedder = embedder
        self._encoder = encoder
        self._names = names
        self._guard = guard
        self._vector_of = vector_of

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/api/chat": {"POST": self._chat},
            "/api/generate": {"POST": self._generate},
            "/api/embed": {"POST": self._embed},
            "/api/tags": {"GET": self._tags},
        }

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> int:
        def ask(body: ChatBody, adapter: LoRARequest | None) -> Ask:
            return chat_ask(body, self._builder.served.chats, adapter)

        return await self._answer(scope, receive, send, ChatBody, ask, lambda body: bool(body.messages))

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> int:
        def ask(body: GenerateBody, adapter: LoRARequest | None) -> Ask:
            return generate_ask(body, self._builder.served.chats, adapter)

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
        with self._guard.admitted(scope) as tenant:
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, kind)
            model, adapter = self._find(body.model)
            if not has_prompt(body):  # an order to load the model
                piece = {"message": {"role": "assistant", "content": ""}} if has_messages else {"response": ""}
                made = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
                return await send_json(
                    send, {"model": model, "created_at": made, **piece, "done": True, "done_reason": "load"}
                )

            def build() -> tuple[Call, Rendering]:
                words = OF_CHAT if has_messages else WORDS
                call = self._builder.call(ask_of(body, adapter), words, self._front.limits, model)
                return call, rendering(began, has_messages=has_messages)

            return await self._runner.run(build, tenant, scope, receive, send, num_bytes=len(data), began=began)

    async def _embed(self, scope: Scope, receive: Receive, send: Send) -> int:
        began = time.monotonic()
        with self._guard.admitted(scope) as tenant:
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, EmbedBody)
            model, adapter = self._find(body.model)

            def build() -> list[Request]:
                limits = self._front.limits
                texts = [body.input] if isinstance(body.input, str) else body.input
                given = [text if body.truncate is False else self._cut(text, limits) for text in texts]
                wanted = EmbeddingBody(input=[*given], dimensions=body.dimensions)
                return embedding_requests(wanted, self._builder.served, limits, adapter, self._vector_of)

            vectors, num_tokens = await self._embedder.run(
                build, tenant, receive, num_bytes=len(data), dimensions=body.dimensions
            )
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

    def _cut(self, text: str, limits: RequestLimits) -> list[int]:
        """As many leading tokens of a text as the engine takes. Raises APIError."""
        most = min(limits.max_input_len, limits.max_seq_len - 1, limits.kv_cache_tokens)
        with in_words({"prompt": "input"}):
            return self._encoder.encode_beginning(text, limits, most)

    async def _tags(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        description = self._front.description
        details = {
            "format": "safetensors",
            "family": description.architecture,
            "families": [description.architecture],
            "quantization_level": description.weight_dtype,
        }
        models = [
            {
                "name": card["id"],
                "model": card["id"],
                "modified_at": datetime.fromtimestamp(card["created"], timezone.utc).isoformat(),
                "details": details,
            }
            for card in self._names.cards(self._front.limits.max_seq_len)
        ]
        return await send_json(send, {"models": models})

    def _find(self, name: str) -> tuple[str, LoRARequest | None]:
        return self._names.find(name.removesuffix(LATEST))
