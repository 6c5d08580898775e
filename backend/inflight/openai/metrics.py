"""What /metrics says of this server, in Prometheus' text form. Of the engine it only tells what it is: its
metrics are tritonserver's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from inflight.engine_description import EngineDescription

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """To be used on the event loop's thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._engine = Info("inflight_engine", "What the engine computes, and with what", registry=self._registry)
        self._requests = Counter(
            "inflight_openai_requests",
            "HTTP requests by path and status, 499 if the client did not wait",
            ("path", "status"),
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "inflight_openai_prompt_tokens", "Tokens of answered prompts", registry=self._registry
        )
        self._generated_tokens = Counter(
            "inflight_openai_generated_tokens", "Tokens of answers", registry=self._registry
        )
        self.in_progress = Gauge(
            "inflight_openai_requests_in_progress", "HTTP requests without a complete answer", registry=self._registry
        )
        self._first_token = Histogram(
            "inflight_openai_time_to_first_token_seconds",
            "From a streamed request's arrival to its first chunk",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "inflight_openai_request_duration_seconds",
            "From a request's arrival to the end of its answer",
            ("path",),
            buckets=SECONDS,
            registry=self._registry,
        )

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """`path`: of the route, not as the client wrote it."""
        self._requests.labels(path, str(status)).inc()
        self._duration.labels(path).observe(seconds)

    def count_tokens(self, num_prompt: int, num_generated: int) -> None:
        self._prompt_tokens.inc(num_prompt)
        self._generated_tokens.inc(num_generated)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def text(self, description: EngineDescription) -> bytes:
        """`description`: of the engine now; another launch may be of another checkpoint."""
        self._engine.info(description.labels())
        return generate_latest(self._registry)
