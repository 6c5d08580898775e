"""Responses: the values that the leader rank sends back to the server side.

A request ends with exactly one Response whose `is_final` is true: it holds the last Result, or an error.
"""

from __future__ import annotations

import enum

import msgspec

from inflight.errors import InflightError
from inflight.stats import hit_rate


class FinishReason(enum.IntEnum):
    """Why a sequence ended; `.wire` is the text that clients receive."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5

    @property
    def wire(self) -> str:
        return _WIRE[self]


_WIRE = {
    FinishReason.NOT_FINISHED: "",
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
}


class PerfMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Timestamps of one request on the leader's monotonic clock, in nanoseconds, and its use of KV blocks."""

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    kv_cache_alloc_total_blocks: int = 0
    kv_cache_alloc_new_blocks: int = 0
    kv_cache_reused_blocks: int = 0
    kv_cache_missed_blocks: int = 0

    @property
    def kv_cache_hit_rate(self) -> float:
        """Reused blocks as a share of those looked for; 0 if none was."""
        return hit_rate(self.kv_cache_reused_blocks, self.kv_cache_missed_blocks)


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence of a request."""

    output_token_ids: list[int] = []
    """Tokens generated since the previous Result of the sequence, or all so far if the request asked for that; never
    the prompt."""
    log_probs: list[float] = []
    """Natural log probability of each of these tokens under the model's raw distribution, if requested."""
    cum_log_prob: float = 0.0
    """Sum over the whole sequence so far."""
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    is_final: bool = False
    """Last Result of the request."""
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    """Iterations that have brought the sequence tokens so far."""
    request_perf_metrics: PerfMetrics | None = None
    """Always set on the final Result, because the histogram metrics are computed from it; None on the others."""


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer to a request: a Result, or an error, which is always final."""

    request_id: int
    client_id: str = ""
    """The request's own `client_id`."""
    result: Result | None = None
    error_msg: str = ""
    """One sentence for the person who can correct it; empty if there is a result."""
    error_code: str = ""
    """Name of a tritonserver error code: INVALID_ARGUMENT, UNAVAILABLE, CANCELLED, INTERNAL, ALREADY_EXISTS."""
    outcome: str = ""
    """Of an error: the label under which metrics count the request."""

    @classmethod
    def of_error(cls, request_id: int, error: InflightError) -> Response:
        return cls(request_id=request_id, error_msg=str(error), error_code=error.code, outcome=error.outcome)

    @property
    def is_final(self) -> bool:
        return self.result is None or self.result.is_final

    @property
    def has_error(self) -> bool:
        return self.result is None
