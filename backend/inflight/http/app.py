"""The paths of the server and what answers them: those of each dialect, and the server's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.errors import EngineUnavailable
from inflight.executor.front.front import NOT_AVAILABLE
from inflight.http.api_error import APIError
from inflight.http.connection import endless_stream
from inflight.http.dialects.dialect import Dialect
from inflight.http.endpoint import Endpoint, ErrorForm, Handler, read_only, send_bytes
from inflight.http.guard import Guard
from inflight.http.metrics import CONTENT_TYPE, ServerMetrics
from inflight.http.model_engine import ModelEngine
from inflight.http.page.feed import BatchFeed
from inflight.http.page.index import HEADERS, INDEX
from inflight.http.respond import STREAM_HEADERS

OTHER = "other"
"""What metrics count paths under that do not exist."""
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class App:
    """Every path, over the engines of all models."""

    def __init__(
        self,
        dialects: Sequence[Dialect],
        *,
        engines: Sequence[ModelEngine],
        guard: Guard,
        metrics: ServerMetrics,
        feeds: Mapping[str, BatchFeed],
    ) -> None:
        """Errors at paths that no dialect has are in the form of the first, but below paths that are another's.
        `feeds`: by the engines' names."""
        self._dialects = dialects
        self._engines = engines
        self._guard = guard
        self._metrics = metrics
        self._feeds = feeds

    def routes(self) -> ASGIApp:
        form = self._dialects[0].error_form
        routes = [self._route(path, methods, form) for path, methods in self._own_paths().items()]
        for dialect in self._dialects:
            routes += [
                self._route(path, dict(methods), dialect.error_form) for path, methods in dialect.paths().items()
            ]
        every = dict.fromkeys(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"), self._unknown_path)
        for dialect in self._dialects:
            unknown = Endpoint(OTHER, every, self._metrics, dialect.error_form)
            routes += [Route(path + rest, unknown) for path in dialect.below for rest in ("", "/{rest:path}")]
        return Router(routes, redirect_slashes=False, default=Endpoint(OTHER, every, self._metrics, form))

    def _own_paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/": read_only(self._page),
            "/events": {"GET": self._events},
            "/health": read_only(self._health),
            "/health/ready": read_only(self._health),
            "/metrics": read_only(self._metrics_text),
        }

    def _route(self, path: str, methods: Mapping[str, Handler], form: ErrorForm) -> Route:
        return Route(path, Endpoint(path, methods, self._metrics, form))

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await send_bytes(send, b"", "text/plain", 200 if all(each.is_well() for each in self._engines) else 503)

    async def _metrics_text(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        descriptions = {each.name: each.front.description for each in self._engines if each.is_loaded}
        return await send_bytes(send, self._metrics.text(descriptions), CONTENT_TYPE)

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> int:
        # Without a key, which only the page itself can ask for: it is the same for everybody.
        return await send_bytes(send, INDEX, "text/html; charset=utf-8", headers=HEADERS)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        engine = self._watched(scope)
        if not engine.front.is_ready():
            raise EngineUnavailable(NOT_AVAILABLE)
        with self._feeds[engine.name].viewing() as join:
            await send({"type": "http.response.start", "status": 200, "headers": [EVENTS, *STREAM_HEADERS]})
            connection = endless_stream(scope)
            connection.write_chunk(b": the batch\n\n")
            join(connection)
            while (await receive())["type"] != "http.disconnect":
                continue
        return 200

    def _watched(self, scope: Scope) -> ModelEngine:
        """The engine that the query names; without one the first. Raises APIError."""
        wanted = parse_qs(scope["query_string"].decode("latin-1")).get("model", [self._engines[0].name])[0]
        found = next((each for each in self._engines if each.name == wanted), None)
        if found is None:
            raise APIError(404, f"no model is called so: there are {', '.join(each.name for each in self._engines)}")
        return found

    async def _unknown_path(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._guard.check_key(scope)
        raise APIError(404, "this server has no such path")
