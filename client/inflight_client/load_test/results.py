"""Evaluates perf_analyzer's export: the timeline of each request, and percentiles over a level.

How a response is counted: a busy server merges several tokens into one response, so timestamps are those of responses,
not of tokens; the number of tokens is read from the response's `sequence_length`. Time to first token ends at the first
response. Inter-token latency spreads the gap before a response evenly over its tokens: one of 4 tokens that arrives
20 ms after the previous one counts as four latencies of 5 ms. The gaps themselves are kept as inter-response latency,
which is what a reader of the stream waits for. An empty final response counts for end-to-end latency only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inflight_client._exceptions import LoadTestError
from inflight_client.load_test.perf_analyzer import MeasurementsLost
from inflight_client.load_test.sweep import Level, LoadMode

_MS = 1e-6  # milliseconds in a nanosecond


@dataclass(frozen=True)
class RequestTimeline:
    """One request. Times in nanoseconds on one clock."""

    sent: int
    responses: tuple[int, ...]
    """Arrival time of each response with tokens."""
    tokens: tuple[int, ...]
    """Number of tokens in each of them."""
    ended: int
    """Arrival time of the last response, with or without tokens."""
    num_input_tokens: int | None = None


@dataclass(frozen=True)
class Percentiles:
    """Of latencies, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float], weights: Sequence[int] | None = None) -> Percentiles:
        """`weights`: how many times each sample counts."""
        values = np.repeat(samples, weights) if weights is not None else np.asarray(samples, dtype=np.float64)
        if not values.size:
            return cls(*[float("nan")] * 4)
        p50, p90, p99 = np.percentile(values, [50, 90, 99])
        return cls(float(values.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True, kw_only=True)
class LevelResult:
    """Figures of one level. Latencies in milliseconds, throughputs per second."""

    mode: LoadMode
    value: float
    num_requests: int
    duration: float
    """Seconds from the first request sent to the last response."""
    output_tokens_per_s: float
    requests_per_s: float
    num_input_tokens: int | None
    num_output_tokens: int
    tokens_per_response: float
    time_to_first_token: Percentiles
    inter_token_latency: Percentiles
    inter_response_latency: Percentiles
    end_to_end_latency: Percentiles

    @property
    def name(self) -> str:
        return f"{self.mode.label} {self.value:g}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mode": self.mode.value}


def read_level(export: Path, level: Level) -> LevelResult:
    """Results of the one level in `export`. Raises LoadTestError if requests are missing or without tokens."""
    try:
        content = json.loads(export.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementsLost(f"{level.name}: the measurements of perf_analyzer are cut off: {error}") from None
    try:
        timelines = [timeline(request) for experiment in content["experiments"] for request in experiment["requests"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LoadTestError(f"{level.name}: the measurements of perf_analyzer cannot be read: {error!r}") from None
    if len(timelines) < level.num_requests:
        raise LoadTestError(f"{level.name}: only {len(timelines)} of {level.num_requests} requests were measured")
    empty = sum(not request.responses for request in timelines)
    if empty:
        raise LoadTestError(f"{level.name}: {empty} of {len(timelines)} requests ended without a token")
    return summarise(level, timelines)


def timeline(request: dict[str, Any]) -> RequestTimeline:
    """One request of the export.

    The export has every output of the model for every response; outputs that were not sent contain uninitialised memory
    (strings are empty). The last tokens of an answer have a finish reason: a last response without one has no tokens.
    """
    stamps, outputs = list(request["response_timestamps"]), list(request["response_outputs"])
    if request.get("has_error") or len(stamps) != len(outputs):
        raise LoadTestError("a request ended with an error")
    ended = stamps[-1] if stamps else request["timestamp"]
    if outputs and not outputs[-1].get("finish_reason"):
        del stamps[-1], outputs[-1]
    limit = int(request["request_inputs"]["max_tokens"])
    return RequestTimeline(
        sent=request["timestamp"],
        responses=tuple(stamps),
        tokens=tuple(_num_tokens(output, limit) for output in outputs),
        ended=ended,
        num_input_tokens=int(outputs[0]["num_input_tokens"]) if outputs and "num_input_tokens" in outputs[0] else None,
    )


def summarise(level: Level, timelines: Sequence[RequestTimeline]) -> LevelResult:
    duration = (max(one.ended for one in timelines) - min(one.sent for one in timelines)) * 1e-9
    num_output_tokens = sum(sum(one.tokens) for one in timelines)
    gaps = [gap for one in timelines for gap in np.diff(one.responses) * _MS]
    gap_tokens = [count for one in timelines for count in one.tokens[1:]]
    inputs = [one.num_input_tokens for one in timelines]
    return LevelResult(
        mode=level.mode,
        value=level.value,
        num_requests=len(timelines),
        duration=duration,
        output_tokens_per_s=num_output_tokens / duration,
        requests_per_s=len(timelines) / duration,
        num_input_tokens=None if None in inputs else sum(count for count in inputs if count is not None),
        num_output_tokens=num_output_tokens,
        tokens_per_response=num_output_tokens / sum(len(one.responses) for one in timelines),
        time_to_first_token=Percentiles.of([(one.responses[0] - one.sent) * _MS for one in timelines]),
        inter_token_latency=Percentiles.of(
            [gap / max(count, 1) for gap, count in zip(gaps, gap_tokens, strict=True)], gap_tokens
        ),
        inter_response_latency=Percentiles.of(gaps),
        end_to_end_latency=Percentiles.of([(one.ended - one.sent) * _MS for one in timelines]),
    )


def _num_tokens(output: dict[str, Any], limit: int) -> int:
    """Number of tokens in one response; 1 if the server does not send it or the exported number is impossible."""
    for name in ("sequence_length", "num_output_tokens"):
        count = output.get(name)
        if isinstance(count, int) and 0 <= count <= limit:
            return count
    return 1
