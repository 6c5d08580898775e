"""Responses: the values that the leader rank sends back to the server side.

A request ends with exactly one Response whose `is_final` is true: it holds the last Result, or an error.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.context_phase import ContextPhaseParams
from inflight.errors import InflightError
from inflight.stats import hit_rate

Array = npt.NDArray[Any]


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
    """Timestamps of one request on the leader's monotonic clock, in nanoseconds, and its use of KV blocks.

    Of several sequences: from the first start to the last token, with the blocks of all. TensorRT-LLM's fields of
    disaggregated serving (kvCacheTransferStart, kvCacheTransferEnd, kvCacheSize) are not measured here.
    """

    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    kv_cache_alloc_total_blocks: int = 0
    kv_cache_alloc_new_blocks: int = 0
    kv_cache_reused_blocks: int = 0
    kv_cache_missed_blocks: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache when the request's first sequence started."""
    first_iter: int = 0
    """Number of the iteration that brought the first token, as in IterationStats; 0 for beams, which have theirs all at
    once."""
    last_iter: int = 0
    """Of the one that brought the last token."""
    total_draft_tokens: int = 0
    """Draft tokens that steps have verified."""
    total_accepted_draft_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts as a share of those verified; 0 if none was."""
        return self.total_accepted_draft_tokens / self.total_draft_tokens if self.total_draft_tokens else 0.0

    @property
    def kv_cache_hit_rate(self) -> float:
        """Reused blocks as a share of those looked for; 0 if none was."""
        return hit_rate(self.kv_cache_reused_blocks, self.kv_cache_missed_blocks)


class NamedTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An array among a Result's values. Between processes its numbers are a frame of their own, behind the message."""

    name: str
    dtype: Literal["float32", "int32"]
    shape: tuple[int, ...]
    data: bytes = b""
    """Row by row, little-endian."""

    @classmethod
    def of(cls, name: str, array: Array) -> NamedTensor:
        """Of an array of one of the two types."""
        dtype: Literal["float32", "int32"] = "int32" if array.dtype == np.int32 else "float32"
        return cls(
            name=name, dtype=dtype, shape=array.shape, data=np.ascontiguousarray(array, f"<{dtype[0]}4").tobytes()
        )

    def array(self) -> Array:
        """Read-only. Raises ValueError if `data` does not have as many numbers as `shape`."""
        return np.frombuffer(self.data, dtype=f"<{self.dtype[0]}4").reshape(self.shape)


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence of a request."""

    output_token_ids: list[int] = []
    """Tokens generated since the previous Result of the sequence, or all so far if the request asked for that or for
    beams; never the prompt."""
    log_probs: list[float] = []
    """Natural log probability of each of these tokens under the model's raw distribution, if requested."""
    tensors: list[NamedTensor] = []
    """What OutputConfig asked for besides. Their first dimension are tokens: of the prompt for those whose names begin
    with prompt_ or context_, which come with the first Result that follows the prompt's last step; for the others
    exactly the tokens of this Result."""
    cum_log_prob: float = 0.0
    """Sum over the whole sequence so far."""
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    is_final: bool = False
    """Last Result of the request."""
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    """Iterations that have brought the sequence tokens so far."""
    num_cached_tokens: int = 0
    """The same as in the metrics, but with the first Result that the client gets of the first sequence, so that a
    stop string does not come before it, nor a replay change it. 0 on the others."""
    context_phase_params: ContextPhaseParams | None = None
    """With the last Result of a context-only request whose output goes on."""
    request_perf_metrics: PerfMetrics | None = None
    """Always set on the final Result, because the histogram metrics are computed from it; None on the others."""


def join_tensors(results: Iterable[Result]) -> dict[str, Array]:
    """By name, the tensors of all results of one sequence, one behind the other."""
    found: dict[str, list[Array]] = {}
    for result in results:
        for tensor in result.tensors:
            found.setdefault(tensor.name, []).append(tensor.array())
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


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
