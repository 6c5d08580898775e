"""What /metrics says of this server, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from inflight.engine_description import EngineDescription
from inflight.result import PerfMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


MODEL = ("model",)
"""The label that names the engine."""


class ServerMetrics:
    """To be used on the event loop's thread."""

    def __init__(self, of_engines: Collector | None = None) -> None:
        """`of_engines`: what is shown here of the engines."""
        self._registry = CollectorRegistry()
        if of_engines is not None:
            self._registry.register(of_engines)
        ProcessCollector(registry=self._registry)
        self._engine = Info(
            "inflight_engine", "What the engine computes, and with what", MODEL, registry=self._registry
        )
        self._accepted = Counter(
            "inflight_openai_requests_accepted",
            "HTTP requests whose head has come, by path, whatever becomes of them",
            ("path",),
            registry=self._registry,
        )
        self._requests = Counter(
            "inflight_openai_requests",
            "HTTP requests by path and status, 499 if the client did not wait",
            ("path", "status"),
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "inflight_openai_prompt_tokens", "Tokens of answered prompts", MODEL, registry=self._registry
        )
        self._generated_tokens = Counter(
            "inflight_openai_generated_tokens", "Tokens of answers", MODEL, registry=self._registry
        )
        self.in_progress = Gauge(
            "inflight_openai_requests_in_progress", "HTTP requests without a complete answer", registry=self._registry
        )
        self._first_token = Histogram(
            "inflight_openai_time_to_first_token_seconds",
            "From a streamed request's arrival to its first chunk",
            MODEL,
            buckets=SECONDS,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "inflight_openai_time_per_output_token_seconds",
            "Mean time between a prompt's tokens after the first, on the ranks; none if a stop string ended it",
            MODEL,
            buckets=TOKEN_SECONDS,
            registry=self._registry,
        )
        self._prefix_blocks = Counter(
            "inflight_openai_prefix_cache_blocks",
            "Full blocks of prompts that were looked up in the prefix cache",
            (*MODEL, "result"),
            registry=self._registry,
        )
        self._draft_tokens = Counter(
            "inflight_openai_draft_tokens",
            "Draft tokens that steps have verified",
            (*MODEL, "result"),
            registry=self._registry,
        )
        self._duration = Histogram(
            "inflight_openai_request_duration_seconds",
            "From a request's arrival to the end of its answer",
            ("path",),
            buckets=SECONDS,
            registry=self._registry,
        )

    def count_accepted(self, path: str) -> None:
        self._accepted.labels(path).inc()

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """`path`: of the route, not as the client wrote it."""
        self._requests.labels(path, str(status)).inc()
        self._duration.labels(path).observe(seconds)

    def of_model(self, model: str) -> ModelMetrics:
        """`model`: the engine's name."""
        return ModelMetrics(
            prompt_tokens=self._prompt_tokens.labels(model),
            generated_tokens=self._generated_tokens.labels(model),
            first_token=self._first_token.labels(model),
            per_token=self._per_token.labels(model),
            prefix_blocks={result: self._prefix_blocks.labels(model, result) for result in ("hit", "miss")},
            draft_tokens={result: self._draft_tokens.labels(model, result) for result in ("accepted", "rejected")},
        )

    def text(self, descriptions: Mapping[str, EngineDescription]) -> bytes:
        """`descriptions`: of the engines now, by name; another launch may be of another checkpoint."""
        for model, description in descriptions.items():
            self._engine.labels(model).info(description.labels())
        return generate_latest(self._registry)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """What is counted for each model. To be used on the event loop's thread."""

    prompt_tokens: Counter
    generated_tokens: Counter
    first_token: Histogram
    per_token: Histogram
    prefix_blocks: Mapping[str, Counter]
    """By result."""
    draft_tokens: Mapping[str, Counter]
    """By result."""

    def count_tokens(self, num_prompt: int, num_generated: int) -> None:
        self.prompt_tokens.inc(num_prompt)
        self.generated_tokens.inc(num_generated)

    def observe_engine(self, perf: PerfMetrics, num_tokens: int) -> None:
        """What the ranks tell of a prompt; `num_tokens`: of its longest choice."""
        if perf.first_token_time_ns and num_tokens > 1:
            self.per_token.observe((perf.last_token_time_ns - perf.first_token_time_ns) / (num_tokens - 1) / 1e9)
        self.prefix_blocks["hit"].inc(perf.kv_cache_reused_blocks)
        self.prefix_blocks["miss"].inc(perf.kv_cache_missed_blocks)
        self.draft_tokens["accepted"].inc(perf.total_accepted_draft_tokens)
        self.draft_tokens["rejected"].inc(perf.total_draft_tokens - perf.total_accepted_draft_tokens)

    def observe_first_token(self, seconds: float) -> None:
        self.first_token.observe(seconds)
