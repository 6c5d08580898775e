"""One path of the server as an ASGI application: its methods, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from inflight.errors import InflightError
from inflight.executor.front.front import SHUT_DOWN
from inflight.http.api_error import INTERNAL, APIError, of_engine, of_validation, overloaded
from inflight.http.dispatcher import ClientGone
from inflight.http.metrics import ServerMetrics

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""What metrics count for a client that did not wait: nginx's number, nobody receives it."""

ErrorForm = Callable[[APIError], tuple[int, dict[str, Any]]]
"""Status and body of an error, as a dialect has them."""
Handler = Callable[[Scope, Receive, Send], Awaitable[int]]
"""Answers a request and returns the status. Raises only as long as nothing was sent, but for ClientGone."""


class Endpoint:
    def __init__(self, label: str, methods: Mapping[str, Handler], metrics: ServerMetrics, form: ErrorForm) -> None:
        """`label`: the path as metrics show it. `form`: of errors."""
        self._label, self._methods, self._metrics = label, methods, metrics
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 500
        self._metrics.count_accepted(self._label)
        try:
            with self._metrics.in_progress.track_inprogress():
                status = await self._answer(scope, receive, send)
        finally:
            self._metrics.count_request(self._label, status, time.monotonic() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        handler = self._methods.get(scope["method"])
        try:
            if handler is None:
                allowed = ", ".join(self._methods)
                raise APIError(405, f"this path takes {allowed} only", headers={"Allow": allowed})
            return await handler(scope, receive, send)
        except APIError as error:
            return await self._send_error(send, error)
        except InflightError as error:
            return await self._send_error(send, of_engine(error))
        except RecursionError as error:  # a body that could just be read is written deeper within a schema
            return await self._send_error(send, of_validation(error))
        except ClientGone:
            return CLIENT_GONE
        except asyncio.CancelledError:  # this process ends, and the time to drain is over
            return await self._send_error(send, overloaded(503, SHUT_DOWN))
        except Exception as error:
            return await self._send_error(send, unexpected(error))

    async def _send_error(self, send: Send, error: APIError) -> int:
        status, body = self._form(error)
        return await send_json(send, body, status, error.headers)


def unexpected(error: Exception) -> APIError:
    """Log the error's type and traceback, but not its text, which may quote a prompt."""
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("answering a request failed: %s\n%s", type(error).__name__, places)
    return APIError(500, INTERNAL)


async def send_json(send: Send, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> int:
    return await send_bytes(send, msgspec.json.encode(value), "application/json", status, headers)


async def send_bytes(
    send: Send, body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> int:
    """Returns the status."""
    named = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in named.items()],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})
    return status


def read_only(handler: Handler) -> dict[str, Handler]:
    """Methods of a path that is only read. An answer to HEAD is sent without its body."""
    return {"GET": handler, "HEAD": handler}
