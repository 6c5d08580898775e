"""The four callbacks of a GptManager, as TensorRT-LLM's batch manager defines them.

Called on the loop's own thread, in this order in every iteration: poll_stop_signals, send_response (once for each
response that is ready), get_inference_requests (then send_response for each request that is refused),
return_batch_manager_stats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from inflight.errors import RequestError
from inflight.request import Request
from inflight.result import FinishReason, Result
from inflight.scheduler_output import SchedulerOutput

GetInferenceRequestsCallback = Callable[[int], list[Request]]
"""(max_num_requests) -> new requests that have at most that many sequences together; a negative maximum means no limit.

GptManager passes the sequences for which a row is free, never a negative number. It takes more if it is given more:
they wait in its queue. Every rank computes the same maximum and must get the same requests. Called in every iteration,
also with 0; the only callback that may block, and only while nothing is active."""

SendResponseCallback = Callable[[int, Result | None, bool, RequestError | None], None]
"""(request_id, result, is_final, error). An error comes with is_final=True and no result; its text is meant for the
client and its `code` says what kind it is. Called on every rank; only the leader forwards. When it is called with
is_final, everything the request held has been freed and its id may be used again. A request of several sequences is
answered for each of them; only the last response to it is final."""

PollStopSignalCallback = Callable[[], AbstractSet[int] | Mapping[int, FinishReason]]
"""() -> ids of requests to stop, equal on every rank: a set stops them CANCELLED, a mapping gives each its own reason
(TIMED_OUT). Unknown ids are ignored. Also called during shutdown, when no requests are fetched any more."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""(json) Not called after an iteration that ends with nothing active."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """The four callbacks. The first two are mandatory; without `return_batch_manager_stats` no statistics are made."""

    get_inference_requests: GetInferenceRequestsCallback
    send_response: SendResponseCallback
    poll_stop_signals: PollStopSignalCallback | None = None
    return_batch_manager_stats: ReturnBatchManagerStatsCallback | None = None
    wants_batch_manager_stats: Callable[[], bool] | None = None
    """Whether to make the statistics of this iteration, because they will be read. None = always."""
    step_ended: Callable[[SchedulerOutput, int], None] | None = None
    """(step, nanoseconds since the step before it ended, or since it was launched if there was none) Called when a
    step's results have come."""
    end_iteration: Callable[[], None] | None = None
    """Called last in every iteration that leaves requests active or has completed one. What keeps statistics of every
    iteration then calls GptManager.statistics and request_statistics."""
