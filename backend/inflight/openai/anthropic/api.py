"""The paths of the Messages API: POST /v1/messages, and the count of a prompt's tokens."""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from inflight.executor.front.front import Front
from inflight.openai.anthropic.asks import WORDS, message_ask, message_chat
from inflight.openai.anthropic.fields import CountBody, MessagesBody
from inflight.openai.anthropic.rendering import rendering
from inflight.openai.api_error import in_words
from inflight.openai.call import Call
from inflight.openai.call_builder import CallBuilder
from inflight.openai.call_runner import CallRunner
from inflight.openai.endpoint import Handler, send_json
from inflight.openai.fields import decode_body
from inflight.openai.guard import Guard
from inflight.openai.model_names import ModelNames
from inflight.openai.rendering import Rendering
from inflight.openai.text_threads import TextThreads


class MessagesApi:
    def __init__(
        self,
        *,
        front: Front,
        builder: CallBuilder,
        runner: CallRunner,
        names: ModelNames,
        guard: Guard,
        threads: TextThreads,
    ) -> None:
        self._front = front
        self._builder = builder
        self._runner = runner
        self._names = names
        self._guard = guard
        self._threads = threads

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/v1/messages": {"POST": self._create},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
        }

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> int:
        began = time.monotonic()
        with self._guard.admitted(scope) as tenant:
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, MessagesBody)
            model, adapter = self._names.find(body.model)

            def build() -> tuple[Call, Rendering]:
                ask = message_ask(body, self._builder.served.chats, adapter)
                call = self._builder.call(ask, WORDS, self._front.limits, model)
                return call, rendering(body.max_tokens)

            return await self._runner.run(build, tenant, scope, receive, send, num_bytes=len(data), began=began)

    async def _count_tokens(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._guard.admitted(scope):
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, CountBody)
            self._names.find(body.model)

            def count() -> int:
                chats = self._builder.served.chats
                chat = message_chat(body, chats)
                with in_words(WORDS):
                    chats.tools(chat)
                    return len(chats.encode(chat, self._front.limits)[1])

            return await send_json(send, {"input_tokens": await self._threads.run(len(data), count)})
