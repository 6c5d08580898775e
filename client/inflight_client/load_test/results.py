"""What was measured: the timeline of each request, and the figures of a level.

How a response is counted: a busy server merges several tokens into one response, so timestamps are those of responses,
not of tokens. Time to first token ends at the first response. Inter-token latency spreads the gap before a response
evenly over its tokens: one of 4 tokens that arrives 20 ms after the previous one counts as four latencies of 5 ms. Of a
server that tells a request's tokens in sum only, as OpenAI's API does, the time from the first to the last response is
spread over all tokens but one. The gaps themselves are kept as inter-response latency, which is what a reader of the
stream waits for. An empty final response counts for end-to-end latency only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from inflight_client.load_test.sweep import Level, LoadMode

_MS = 1e-6  # milliseconds in a nanosecond

SAMPLES_NEEDED: dict[str, int] = {"p50": 1, "p90": 10, "p99": 100}
"""Percentile -> the fewest samples of which it is stated: with fewer, the largest sample alone would decide it."""


@dataclass(frozen=True)
class RequestTimeline:
    """One request. Times in nanoseconds on one clock."""

    sent: int
    """When it was sent, or at a request rate was due to be sent."""
    responses: tuple[int, ...]
    """Arrival time of each response with tokens."""
    tokens: tuple[int, ...] | None
    """Number of tokens in each of them; None if the server only tells their sum."""
    num_tokens: int
    ended: int
    """Arrival time of the last response, with or without tokens."""
    num_input_tokens: int | None = None

    def token_gaps(self) -> list[tuple[float, int]]:
        """(milliseconds of each token, number of tokens) behind the first response."""
        if self.tokens is None:
            count, span = self.num_tokens - 1, self.responses[-1] - self.responses[0]
            return [(span * _MS / count, count)] if count > 0 and len(self.responses) > 1 else []
        gaps = np.diff(self.responses) * _MS
        return [(gap / max(count, 1), count) for gap, count in zip(gaps, self.tokens[1:], strict=True)]


@dataclass(frozen=True)
class Percentiles:
    """Of latencies, in milliseconds. What the samples cannot carry (SAMPLES_NEEDED) is nan."""

    mean: float
    p50: float
    p90: float
    p99: float
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[float], weights: Sequence[int] | None = None) -> Percentiles:
        """`weights`: how many times each sample counts in the figures; it stays one sample."""
        values = np.repeat(samples, weights) if weights is not None else np.asarray(samples, dtype=np.float64)
        stated = {
            name: float(np.percentile(values, int(name[1:]))) if len(samples) >= needed else math.nan
            for name, needed in SAMPLES_NEEDED.items()
        }
        mean = float(values.mean()) if values.size else math.nan
        return cls(mean=mean, num_samples=len(samples), **stated)


@dataclass(frozen=True, kw_only=True)
class LevelResult:
    """Figures of one level. Latencies in milliseconds, throughputs per second; failed requests count in `errors`
    alone."""

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
    errors: Mapping[str, int] = field(default_factory=dict)
    """Kind of failure -> number of requests."""

    @property
    def name(self) -> str:
        return f"{self.mode.label} {self.value:g}"

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    @property
    def lacks_samples(self) -> bool:
        """Whether a percentile is not stated."""
        spreads = [getattr(self, each.name) for each in fields(self) if each.type == "Percentiles"]
        return any(0 < spread.num_samples < max(SAMPLES_NEEDED.values()) for spread in spreads)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mode": self.mode.value}


def summarise(
    level: Level, timelines: Sequence[RequestTimeline], errors: Mapping[str, int] | None = None
) -> LevelResult:
    """`timelines`: of the requests that were answered, at least one, each with a response."""
    duration = (max(one.ended for one in timelines) - min(one.sent for one in timelines)) * 1e-9
    num_output_tokens = sum(one.num_tokens for one in timelines)
    token_gaps = [gap for one in timelines for gap in one.token_gaps()]
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
        inter_token_latency=Percentiles.of([gap for gap, _ in token_gaps], [count for _, count in token_gaps]),
        inter_response_latency=Percentiles.of([gap for one in timelines for gap in np.diff(one.responses) * _MS]),
        end_to_end_latency=Percentiles.of([(one.ended - one.sent) * _MS for one in timelines]),
        errors=errors or {},
    )
