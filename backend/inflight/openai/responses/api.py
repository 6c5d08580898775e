"""The paths of the Responses API: POST /v1/responses, GET and DELETE of a response that is kept, and the count of an
input's tokens."""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from inflight.executor.front.front import Front
from inflight.openai.api_error import APIError, invalid, unsupported
from inflight.openai.call import Call
from inflight.openai.call_builder import CallBuilder
from inflight.openai.call_runner import CallRunner
from inflight.openai.endpoint import Handler, send_bytes, send_json
from inflight.openai.fields import decode_body
from inflight.openai.guard import Guard, tenant_of
from inflight.openai.model_names import ModelNames
from inflight.openai.rendering import Rendering
from inflight.openai.responses.fields import InputTokensBody, ResponseBody
from inflight.openai.responses.request import Put, ResponseRequest
from inflight.openai.responses.store import ResponseStore, StoredResponse
from inflight.openai.text_threads import TextThreads
from inflight.text.safe_text import safe_text

NONE_KEPT = (
    "this server keeps no responses (max_stored_responses or max_stored_response_bytes is 0): send the whole "
    "conversation as input"
)


class ResponsesApi:
    def __init__(
        self,
        *,
        front: Front,
        builder: CallBuilder,
        runner: CallRunner,
        names: ModelNames,
        guard: Guard,
        store: ResponseStore,
        threads: TextThreads,
    ) -> None:
        self._front = front
        self._builder = builder
        self._runner = runner
        self._names = names
        self._guard = guard
        self._store = store
        self._threads = threads

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/v1/responses": {"POST": self._create},
            "/v1/responses/input_tokens": {"POST": self._count_tokens},
            "/v1/responses/compact": {"POST": self._compact},
            "/v1/responses/{id}": {"GET": self._retrieve, "DELETE": self._delete},
        }

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> int:
        began = time.monotonic()
        with self._guard.admitted(scope) as tenant:
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, ResponseBody)
            model, adapter = self._names.find(body.model)
            put = self._store.put if self._keeps(body) else None
            request, num_before = self._request(body, tenant, put)
            num_bytes = len(data) + num_before

            def build() -> tuple[Call, Rendering]:
                made = request.build(self._builder, self._front.limits, model, adapter)
                return made.call, made.rendering()

            return await self._runner.run(build, tenant, scope, receive, send, num_bytes=num_bytes, began=began)

    async def _count_tokens(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._guard.admitted(scope) as tenant:
            data = await self._guard.read_body(scope, receive)
            body = decode_body(data, InputTokensBody)
            self._names.find(body.model)
            request, num_before = self._request(body, tenant, None)
            count = await self._threads.run(
                len(data) + num_before, lambda: request.count_tokens(self._builder.served.chats, self._front.limits)
            )
            return await send_json(send, {"object": "response.input_tokens", "input_tokens": count})

    async def _compact(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        raise APIError(404, "this server compacts no conversations: send a shorter one as input")

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send) -> int:
        tenant = tenant_of(self._guard.check_key(scope))
        if scope["query_string"] not in (b"", b"stream=false"):
            raise invalid("a response that is kept is sent whole, as it was: leave out the query")
        response_id = scope["path_params"]["id"]
        response = self._store.find(response_id, tenant)
        if response is None:
            raise _not_found(response_id)
        return await send_bytes(send, response.body, "application/json")

    async def _delete(self, scope: Scope, receive: Receive, send: Send) -> int:
        response_id = scope["path_params"]["id"]
        if self._store.take(response_id, tenant_of(self._guard.check_key(scope))) is None:
            raise _not_found(response_id)
        return await send_json(send, {"id": response_id, "object": "response", "deleted": True})

    def _request(self, body: ResponseBody, tenant: int, put: Put | None) -> tuple[ResponseRequest, int]:
        """With the bytes of the conversation before it."""
        previous = self._previous(body, tenant)
        return ResponseRequest(body, tenant, previous, put), 0 if previous is None else previous.num_bytes

    def _keeps(self, body: ResponseBody) -> bool:
        if body.store and not self._store.keeps_any:
            raise unsupported("store", NONE_KEPT)
        return body.store is not False and self._store.keeps_any

    def _previous(self, body: ResponseBody, tenant: int) -> StoredResponse | None:
        response_id = body.previous_response_id
        if response_id is None:
            return None
        if not self._store.keeps_any:
            raise unsupported("previous_response_id", NONE_KEPT)
        response = self._store.find(response_id, tenant)
        if response is None:
            name, code = "previous_response_id", "previous_response_not_found"
            raise invalid(f"Previous response with id '{safe_text(response_id)}' not found.", name, code)
        return response


def _not_found(response_id: str) -> APIError:
    return APIError(404, f"Response with id '{safe_text(response_id)}' not found.")
