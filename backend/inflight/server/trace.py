"""The trace of a Triton request: whose span its own is under, and what is told of it when it has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inflight.request_spans import EndedRequest, of_output, of_request
from inflight.server.work_item import WorkItem


def find_parent(request: Any) -> Mapping[str, str] | None:
    """The headers that name tritonserver's span of a pb_utils.InferenceRequest; None if it does not trace this one."""
    context = request.trace().get_context()
    return dict(json.loads(context)) if context else None


def ended_request(item: WorkItem, parent: Mapping[str, str], model: str, error: str) -> EndedRequest:
    """`error`: the code of the error with which it ended, or ""."""
    request = item.request
    return EndedRequest(
        operation="text_completion",
        model=model,
        parent=parent,
        began_ns=item.accepted_ns,
        ended_ns=item.answered_ns,
        perf_metrics=[item.perf_metrics] if item.perf_metrics is not None else [],
        error=error,
        attributes={
            **of_request(request),
            **of_output(len(request.input_token_ids), item.num_output_tokens, item.finish_reasons),
            "inflight.request_id": item.shown_id,
        },
    )
