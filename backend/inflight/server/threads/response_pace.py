"""A rate limit for the responses of streams, for machines where sending takes CPU time from the ranks."""

from __future__ import annotations

import time

RESPONSES_PER_CORE = 60.0
"""Responses per second and core when the engine runs on a CPU. A response delays the ranks by about 0.4 ms there:
tritonserver, its stub and the client switch threads ten times for it, and all threads of the ranks wait for the one
that lost its core. Measured with 32 requests on 2 cores, 16 at a time, through tritonserver: 0.85 of the engine's own
throughput without a limit; in another run 0.90 with 150 responses a second, 0.92 with 100, 0.93 with 80 (135 M
parameters, bfloat16, 2026-11-21). With fewer, the reader of a stream would notice the delay."""


def choose_rate(configured: int, device: str, num_cores: int) -> float:
    """The rate limit in responses per second, 0 = none. `configured`: the key max_responses_per_second, negative =
    choose by the device ("cpu" or "cuda") and the number of cores."""
    if configured >= 0:
        return configured
    return RESPONSES_PER_CORE * num_cores if device == "cpu" else 0.0


class ResponsePace:
    """The rate limiter. After n responses it is closed for n / `per_second` seconds. Not thread safe."""

    def __init__(self, per_second: float) -> None:
        """0 = no limit."""
        self._seconds_each = 1.0 / per_second if per_second else 0.0
        self._opens_at = 0.0

    def seconds_closed(self) -> float:
        """Seconds until the limiter opens again; 0 = it is open."""
        return max(self._opens_at - time.monotonic(), 0.0) if self._seconds_each else 0.0

    def count(self, num_responses: int) -> None:
        """Tell the limiter that so many responses were sent."""
        self._opens_at = max(self._opens_at, time.monotonic()) + num_responses * self._seconds_each
