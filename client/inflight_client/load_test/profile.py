"""Reads perf_analyzer's export: the timeline of each request of a level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inflight_client._exceptions import LoadTestError
from inflight_client.load_test.perf_analyzer import MeasurementsLost
from inflight_client.load_test.results import LevelResult, RequestTimeline, summarise
from inflight_client.load_test.sweep import Level
from inflight_client.load_test.tensor_requests import RequestForm


def read_level(export: Path, level: Level, form: RequestForm = RequestForm.LLM) -> LevelResult:
    """Results of the one level in `export`. Raises LoadTestError if requests are missing or without tokens."""
    try:
        content = json.loads(export.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementsLost(f"{level.name}: the measurements of perf_analyzer are cut off: {error}") from None
    try:
        requests = [request for experiment in content["experiments"] for request in experiment["requests"]]
        timelines = [timeline(request, form) for request in requests]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LoadTestError(f"{level.name}: the measurements of perf_analyzer cannot be read: {error!r}") from None
    if len(timelines) < level.num_requests:
        raise LoadTestError(f"{level.name}: only {len(timelines)} of {level.num_requests} requests were measured")
    empty = sum(not request.responses for request in timelines)
    if empty:
        raise LoadTestError(f"{level.name}: {empty} of {len(timelines)} requests ended without a token")
    return summarise(level, timelines)


def timeline(request: dict[str, Any], form: RequestForm = RequestForm.LLM) -> RequestTimeline:
    """One request of the export.

    The export has every output of the model for every response; outputs that were not sent contain uninitialised memory
    (strings are empty). So a last response is one without tokens if a text is empty that the last tokens have.
    """
    stamps, outputs = list(request["response_timestamps"]), list(request["response_outputs"])
    if request.get("has_error") or len(stamps) != len(outputs):
        raise LoadTestError("a request ended with an error")
    ended = stamps[-1] if stamps else request["timestamp"]
    if outputs and not outputs[-1].get(form.last_text):
        del stamps[-1], outputs[-1]
    limit = form.max_tokens(request["request_inputs"])
    tokens = tuple(_num_tokens(output, limit) for output in outputs)
    return RequestTimeline(
        sent=request["timestamp"],
        responses=tuple(stamps),
        tokens=tokens,
        num_tokens=sum(tokens),
        ended=ended,
        num_input_tokens=int(outputs[0]["num_input_tokens"]) if outputs and "num_input_tokens" in outputs[0] else None,
    )


def _num_tokens(output: dict[str, Any], limit: int) -> int:
    """Number of tokens in one response; 1 if the server does not send it or the exported number is impossible."""
    for name in ("sequence_length", "num_output_tokens"):
        count = output.get(name)
        if isinstance(count, int) and 0 <= count <= limit:
            return count
    return 1
