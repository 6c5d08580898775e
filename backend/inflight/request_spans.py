"""OpenTelemetry spans of requests, under the span of whoever sent them: tritonserver, or an OpenAI server's client.

    chat llm                 from acceptance to the last response, with the event `first_token`
      queue                  from the arrival at the ranks to the first step
      prefill                to the first token
      decode                 to the last token

They are made when a request has ended, from the times that its metrics have too, and exported in batches by a thread of
OpenTelemetry's own, over OTLP. Attributes follow the conventions gen_ai.*; none has text of a prompt or of an output.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inflight.errors import ConfigurationError
from inflight.request import Request
from inflight.result import PerfMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanKind

Attributes = Mapping[str, "str | int | float | Sequence[str]"]

CLOSE_SECONDS = 2.0
"""How long `close` waits until the last spans are exported: a receiver that is away must not keep a process."""

_PHASES = (
    ("queue", "arrival_time_ns", "first_scheduled_time_ns"),
    ("prefill", "first_scheduled_time_ns", "first_token_time_ns"),
    ("decode", "first_token_time_ns", "last_token_time_ns"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """What is told of a request. Times in nanoseconds of the monotonic clock, which the ranks of this host share."""

    operation: str
    """`chat` or `text_completion`."""
    model: str
    parent: Mapping[str, str]
    """The W3C headers `traceparent` and, if there is one, `tracestate`; empty or wrong = the span has no parent."""
    began_ns: int
    ended_ns: int
    perf_metrics: Sequence[PerfMetrics] = ()
    """Of each of its prompts, as far as the engine has told them."""
    error: str = ""
    """Its code, or its HTTP status; "" = it ended well."""
    attributes: Attributes = field(default_factory=dict)


class RequestSpans:
    """Makes and exports spans. Thread safe."""

    def __init__(self, endpoint: str, *, is_outermost: bool) -> None:
        """`endpoint`: the URL of an OTLP receiver for traces. `is_outermost`: requests come from other processes than
        ours. Raises ConfigurationError if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigurationError(
                f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'inflight[otel]'"
            ) from None
        # Its complaints about a receiver that is away go where ours go.
        logging.getLogger("opentelemetry").handlers = [*logging.getLogger("inflight").handlers]
        logging.getLogger("opentelemetry").propagate = False
        self._provider = TracerProvider(resource=Resource.create({"service.name": "inflight"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("inflight")
        self._propagator = TraceContextTextMapPropagator()
        self._kind: SpanKind = SpanKind.SERVER if is_outermost else SpanKind.INTERNAL

    def record(self, request: EndedRequest) -> None:
        """Make the spans of a request. Never waits: what the exporter has no room for is dropped."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        to_wall = time.time_ns() - time.monotonic_ns()
        span: Span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=self._propagator.extract(request.parent),
            kind=self._kind,
            start_time=request.began_ns + to_wall,
            attributes={
                "gen_ai.operation.name": request.operation,
                "gen_ai.provider.name": "inflight",
                "gen_ai.request.model": request.model,
                **request.attributes,
            },
        )
        if request.error:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", request.error)
        inside = set_span_in_context(span)
        for perf in request.perf_metrics:
            for name, value in _of_engine(perf).items():
                span.set_attribute(name, value)
            if perf.first_token_time_ns:
                span.add_event("first_token", timestamp=perf.first_token_time_ns + to_wall)
            for name, begin, end in _PHASES:
                began_ns, ended_ns = getattr(perf, begin), getattr(perf, end)
                if began_ns and ended_ns:
                    phase = self._tracer.start_span(name, context=inside, start_time=began_ns + to_wall)
                    phase.end(ended_ns + to_wall)
        span.end(request.ended_ns + to_wall)

    def close(self) -> None:
        """Export what is left, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="inflight-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def open_spans(endpoint: str, *, is_outermost: bool) -> RequestSpans | None:
    """None for an endpoint "", at no cost. Raises ConfigurationError."""
    return RequestSpans(endpoint, is_outermost=is_outermost) if endpoint else None


def of_request(request: Request) -> dict[str, str | int | float | Sequence[str]]:
    """The attributes of what a request asks for."""
    sampling = request.sampling_config
    attributes: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
    }
    if request.num_return_sequences > 1:
        attributes["gen_ai.request.choice.count"] = request.num_return_sequences
    return attributes


def of_output(num_input_tokens: int, num_output_tokens: int, finish_reasons: Sequence[str]) -> Attributes:
    """The attributes of what became of it."""
    return {
        "gen_ai.usage.input_tokens": num_input_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.response.finish_reasons": [reason for reason in finish_reasons if reason],
    }


def _of_engine(perf: PerfMetrics) -> dict[str, int]:
    return {
        "inflight.prefix_cache.reused_blocks": perf.kv_cache_reused_blocks,
        "inflight.prefix_cache.missed_blocks": perf.kv_cache_missed_blocks,
        "inflight.draft_tokens.verified": perf.total_draft_tokens,
        "inflight.draft_tokens.accepted": perf.total_accepted_draft_tokens,
    }
