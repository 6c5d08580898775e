"""A receiver of OpenTelemetry traces: an HTTP server that keeps the spans which are posted to it.

    with OtlpReceiver() as receiver:
        ...  # something that exports to receiver.endpoint
        (span,) = receiver.wait_for("prefill")

Both encodings of OTLP over HTTP: protobuf, and JSON, which tritonserver sends.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE = 180.0


@dataclass(frozen=True)
class Span:
    """Ids in hexadecimal digits, times in nanoseconds since the epoch."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """"" = none."""
    start: int
    end: int
    is_error: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    """Name -> time."""


class OtlpReceiver:
    """Listens on a free port of loopback for as long as the context lasts."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                is_json = self.headers["content-type"] == "application/json"
                receiver.take(of_json(body) if is_json else of_protobuf(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="otlp-receiver", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, spans: list[Span]) -> None:
        with self._changed:
            self._spans += spans
            self._changed.notify_all()

    def spans(self, trace_id: str) -> list[Span]:
        """Those of a trace so far."""
        with self._changed:
            return [span for span in self._spans if span.trace_id == trace_id]

    def wait_for(self, name: str, number: int = 1) -> list[Span]:
        """So many spans of this name."""

        def found() -> list[Span]:
            return [span for span in self._spans if span.name == name]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= number, PATIENCE), [s.name for s in self._spans]
            return found()


def of_protobuf(body: bytes) -> list[Span]:
    return [
        Span(
            service=next(each.value.string_value for each in group.resource.attributes if each.key == "service.name"),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            attributes={each.key: _value(each.value) for each in span.attributes},
            events={event.name: event.time_unix_nano for event in span.events},
        )
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def of_json(body: bytes) -> list[Span]:
    return [
        Span(
            service="triton-inference-server",
            name=span["name"],
            trace_id=span["traceId"],
            span_id=span["spanId"],
            parent_id=span.get("parentSpanId", ""),
            start=int(span["startTimeUnixNano"]),
            end=int(span["endTimeUnixNano"]),
        )
        for group in msgspec.json.decode(body)["resourceSpans"]
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    with contextlib.suppress(TypeError):
        return getattr(value, kind)
    return None
