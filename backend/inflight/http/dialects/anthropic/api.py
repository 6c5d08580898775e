"""The paths of the Messages API: POST /v1/messages, and the count of a prompt's tokens."""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from inflight.http.api_error import in_words
from inflight.http.call import Call
from inflight.http.dialects.anthropic.asks import WORDS, message_ask, message_chat
from inflight.http.dialects.anthropic.errors import in_anthropics_form
from inflight.http.dialects.anthropic.fields import CountBody, MessagesBody
from inflight.http.dialects.anthropic.rendering import rendering
from inflight.http.dialects.body import decode_body
from inflight.http.encoders import check_generates
from inflight.http.endpoint import Handler, send_json
from inflight.http.rendering import Rendering
from inflight.http.service import Service


class MessagesApi:
    def __init__(self, service: Service) -> None:
        self.error_form = in_anthropics_form
        self.below = ("/v1/messages",)
        self.loads_itself: frozenset[str] = frozenset()
        self.name_tag = ""
        self._service = service

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/v1/messages": {"POST": self._create},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
        }

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> int:
        began = time.monotonic()
        with self._service.guard.admitted(scope) as tenant:
            data = await self._service.guard.read_body(scope, receive)
            body = decode_body(data, MessagesBody)
            model, adapter = self._service.names.find(body.model)

            def build() -> tuple[Call, Rendering]:
                ask = message_ask(body, self._service.served.chats, adapter)
                call = self._service.builder.call(ask, WORDS, self._service.limits, model, id_prefix="msg_")
                return call, rendering(body.max_tokens)

            return await self._service.runner.run(build, tenant, scope, receive, send, num_bytes=len(data), began=began)

    async def _count_tokens(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._service.guard.admitted(scope):
            data = await self._service.guard.read_body(scope, receive)
            body = decode_body(data, CountBody)
            self._service.names.find(body.model)

            def count() -> int:
                check_generates(self._service.limits)
                chats = self._service.served.chats
                chat = message_chat(body, chats)
                with in_words(WORDS):
                    chats.tools(chat)
                    return len(chats.encode(chat, self._service.limits)[1])

            return await send_json(send, {"input_tokens": await self._service.threads.run(len(data), count)})
