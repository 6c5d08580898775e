"""The four callbacks through which a GptManager meets the outside, as TensorRT-LLM's batch manager defines them.

Called on the loop's own thread, in this order in every iteration: poll_stop_signals, send_response (once for each
response that is ready), get_inference_requests, return_batch_manager_stats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.request import Request
from inflight.result import Result

GetInferenceRequestsCallback = Callable[[int], list[Request]]
"""(max_num_requests) -> new requests, at most that many. Every rank computes the same maximum and must get the same
requests. Called in every iteration, also with 0; the only callback that may block, and only while nothing is active."""

SendResponseCallback = Callable[[int, "Result | None", bool, str], None]
"""(request_id, result, is_final, error). A non-empty error comes with is_final=True and no result. Called on every rank;
only the leader forwards. When it is called with is_final, everything the request held has been freed."""

PollStopSignalCallback = Callable[[], "set[int]"]
"""() -> ids of requests to stop, equal on every rank. Unknown ids are ignored."""

ReturnBatchManagerStatsCallback = Callable[[str], None]
"""(json) Not called after an iteration that ends with nothing active."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """The four, together. Get and send are mandatory."""

    get_inference_requests: GetInferenceRequestsCallback
    send_response: SendResponseCallback
    poll_stop_signals: PollStopSignalCallback | None = None
    return_batch_manager_stats: ReturnBatchManagerStatsCallback | None = None
