"""The paths of the Responses API: POST /v1/responses, GET and DELETE of a response that is kept, and the count of an
input's tokens."""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from inflight.http.api_error import APIError, invalid, unsupported
from inflight.http.call import Call
from inflight.http.dialects.body import decode_body
from inflight.http.dialects.openai.responses.fields import InputTokensBody, ResponseBody
from inflight.http.dialects.openai.responses.request import Put, ResponseRequest
from inflight.http.dialects.openai.responses.store import ResponseStore, StoredResponse
from inflight.http.endpoint import Handler, send_bytes, send_json
from inflight.http.guard import tenant_of
from inflight.http.rendering import Rendering
from inflight.http.service import Service
from inflight.text.safe_text import safe_text

NONE_KEPT = (
    "this server keeps no responses (max_stored_responses or max_stored_response_bytes is 0): send the whole "
    "conversation as input"
)


class ResponsesApi:
    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/v1/responses": {"POST": self._create},
            "/v1/responses/input_tokens": {"POST": self._count_tokens},
            "/v1/responses/compact": {"POST": self._compact},
            "/v1/responses/{id}": {"GET": self._retrieve, "DELETE": self._delete},
        }

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> int:
        began = time.monotonic()
        with self._service.guard.admitted(scope) as tenant:
            data = await self._service.guard.read_body(scope, receive)
            body = decode_body(data, ResponseBody)
            model, adapter = self._service.names.find(body.model)
            put = self._store.put if self._keeps(body) else None
            request, num_before = self._request(body, tenant, put)
            num_bytes = len(data) + num_before

            def build() -> tuple[Call, Rendering]:
                made = request.build(self._service.builder, self._service.limits, model, adapter)
                return made.call, made.rendering()

            return await self._service.runner.run(build, tenant, scope, receive, send, num_bytes=num_bytes, began=began)

    async def _count_tokens(self, scope: Scope, receive: Receive, send: Send) -> int:
        with self._service.guard.admitted(scope) as tenant:
            data = await self._service.guard.read_body(scope, receive)
            body = decode_body(data, InputTokensBody)
            self._service.names.find(body.model)
            request, num_before = self._request(body, tenant, None)
            count = await self._service.threads.run(
                len(data) + num_before, lambda: request.count_tokens(self._service.served.chats, self._service.limits)
            )
            return await send_json(send, {"object": "response.input_tokens", "input_tokens": count})

    async def _compact(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._service.guard.check_key(scope)
        raise APIError(404, "this server compacts no conversations: send a shorter one as input")

    async def _retrieve(self, scope: Scope, receive: Receive, send: Send) -> int:
        tenant = tenant_of(self._service.guard.check_key(scope))
        if scope["query_string"] not in (b"", b"stream=false"):
            raise invalid("a response that is kept is sent whole, as it was: leave out the query")
        response_id = scope["path_params"]["id"]
        response = self._store.find(response_id, tenant)
        if response is None:
            raise _not_found(response_id)
        return await send_bytes(send, response.body, "application/json")

    async def _delete(self, scope: Scope, receive: Receive, send: Send) -> int:
        response_id = scope["path_params"]["id"]
        if self._store.take(response_id, tenant_of(self._service.guard.check_key(scope))) is None:
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
