"""The paths of OpenAI's API: what generates, embeddings, and tokens; those of models, adapters and responses beside."""

from __future__ import annotations

import time
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from inflight.asking.tool_use import check_tools
from inflight.asking.vectors import embedding_requests, unit_vectors
from inflight.http.api_error import in_words, invalid
from inflight.http.call import Call
from inflight.http.call_builder import CallBuilder
from inflight.http.dialects.body import decode_body
from inflight.http.dialects.openai.answer import WholeAnswer
from inflight.http.dialects.openai.asks import OF_CHAT, chat_ask, chat_of, completion_ask, scores_only
from inflight.http.dialects.openai.bounded_fields import read_request_id
from inflight.http.dialects.openai.embeddings import EmbeddingBody, answer, prompts_of
from inflight.http.dialects.openai.errors import in_openais_form
from inflight.http.dialects.openai.fields import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_fields,
    check_stream_options,
)
from inflight.http.dialects.openai.models import ModelsApi
from inflight.http.dialects.openai.rerank import RerankApi
from inflight.http.dialects.openai.responses.api import ResponsesApi
from inflight.http.dialects.openai.responses.store import ResponseStore
from inflight.http.dialects.openai.stream import StreamedAnswer
from inflight.http.encoders import check_generates
from inflight.http.endpoint import Handler, send_json
from inflight.http.pooled_runner import OF_VECTORS
from inflight.http.rendering import Rendering
from inflight.http.service import Service
from inflight.lora import LoRARequest
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.text.text_decoder import make_text_decoder

BodyT = TypeVar("BodyT", ChatBody, CompletionBody)
MAX_DETOKENIZED = 2**20
"""Tokens of one body of /detokenize."""
RENDERING = Rendering(WholeAnswer, StreamedAnswer)
"""Of completions and of chat completions."""


class OpenAIApi:
    def __init__(self, service: Service, store: ResponseStore, *, allows_lora_updates: bool = False) -> None:
        self.error_form = in_openais_form
        self.below: tuple[str, ...] = ()
        self.loads_itself: frozenset[str] = frozenset()
        self.name_tag = ""
        self._service = service
        self._models = ModelsApi(service, allows_lora_updates=allows_lora_updates)
        self._rerank = RerankApi(service)
        self._responses = ResponsesApi(service, store)

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat_completions},
            "/v1/embeddings": {"POST": self._embeddings},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            **self._models.paths(),
            **self._rerank.paths(),
            **self._responses.paths(),
        }

    # -- generation ----------------------------------------------------------------------------------------------------

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await self._generate(scope, receive, send, CompletionBody)

    async def _chat_completions(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await self._generate(scope, receive, send, ChatBody)

    async def _generate(self, scope: Scope, receive: Receive, send: Send, kind: type[BodyT]) -> int:
        began, service = time.monotonic(), self._service
        with service.guard.admitted(scope) as tenant:
            data = await service.guard.read_body(scope, receive)
            body = decode_body(data, kind)
            model, adapter = service.names.find(body.model)
            return await service.runner.run(
                lambda: (call_of(service.builder, body, service.limits, model, adapter), RENDERING),
                tenant,
                scope,
                receive,
                send,
                num_bytes=len(data),
                began=began,
            )

    # -- vectors -------------------------------------------------------------------------------------------------------

    async def _embeddings(self, scope: Scope, receive: Receive, send: Send) -> int:
        service = self._service
        with service.guard.admitted(scope) as tenant:
            data = await service.guard.read_body(scope, receive)
            body = decode_body(data, EmbeddingBody)
            model, adapter = service.names.find(body.model)

            def build() -> list[Request]:
                return embedding_requests(
                    prompts_of(body),
                    body.dimensions,
                    service.served,
                    service.limits,
                    adapter,
                    service.vector_of,
                    before=service.text_prompts.chosen(body.prompt_name, body.input_type),
                )

            rows, num_tokens = await service.pooled.run(build, tenant, receive, num_bytes=len(data), words=OF_VECTORS)
            vectors = unit_vectors(rows, body.dimensions)
            return await send_json(send, answer(vectors, model, body.encoding_format, num_tokens))

    # -- tokens --------------------------------------------------------------------------------------------------------

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> int:
        service = self._service
        with service.guard.admitted(scope):
            data = await service.guard.read_body(scope, receive)
            body = decode_body(data, TokenizeBody)
            service.names.find(body.model)
            ids = await service.threads.run(len(data), lambda: self._tokens_of(body))
            texts = [service.tokenizer.token(token) or "" for token in ids] if body.return_token_strs else None
            limit = service.limits.max_seq_len
            return await send_json(
                send, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}
            )

    def _tokens_of(self, body: TokenizeBody) -> list[int]:
        service, limits = self._service, self._service.limits
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give prompt or messages, one of the two", "prompt")
        if body.messages is None:
            assert body.prompt is not None
            added = body.add_special_tokens is not False
            with in_words({}):
                return service.encoder.encode(body.prompt, limits, add_special_tokens=added) if body.prompt else []
        check_generates(limits)
        chat = chat_of(body)
        with in_words(OF_CHAT):
            check_tools(chat.tools or [])
            return service.served.chats.encode(chat, limits)[1]

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> int:
        service = self._service
        with service.guard.admitted(scope):
            data = await service.guard.read_body(scope, receive)
            body = decode_body(data, DetokenizeBody)
            service.names.find(body.model)
            text = await service.threads.run(len(data), lambda: self._text_of(body))
            return await send_json(send, {"prompt": text})

    def _text_of(self, body: DetokenizeBody) -> str:
        size = self._service.limits.vocab_size
        if len(body.tokens) > MAX_DETOKENIZED or not all(0 <= token < size for token in body.tokens):
            raise invalid(f"tokens must be at most {MAX_DETOKENIZED} token ids from 0 to {size - 1}", "tokens")
        decoder = make_text_decoder(self._service.tokenizer, [], shows_special=True)
        return "".join(map(decoder.push, body.tokens)) + decoder.flush()


def call_of(
    builder: CallBuilder,
    body: ChatBody | CompletionBody,
    limits: RequestLimits,
    model: str,
    adapter: LoRARequest | None,
) -> Call:
    """Raises APIError."""
    check_fields(body)
    includes_usage = check_stream_options(body)
    if isinstance(body, ChatBody):
        ask, words = chat_ask(body, limits, adapter)
    else:
        ask, words = completion_ask(body, limits, adapter)
    return builder.call(
        ask,
        words,
        limits,
        model,
        id_prefix="chatcmpl-" if isinstance(body, ChatBody) else "cmpl-",
        client_id=read_request_id(body.request_id),
        includes_usage=includes_usage,
        scores_only=isinstance(body, CompletionBody) and scores_only(body),
        shows_ids=bool(body.return_tokens_as_token_ids),
    )
