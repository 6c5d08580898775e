"""Triton's request parameters: the few that this engine reads.

Clients send parameters beside the tensors, as `parameters={...}` over gRPC or as extra keys of a JSON body. Keys that
are not listed here are ignored, because tools attach their own: TensorRT-LLM's backend ignores `Streaming`, for
example, and tritonserver sets `triton_*`. `priority` is ignored too: tritonserver uses it for its own queue and passes
it on only over HTTP, so the engine's parameter is named `request_priority`. `timeout` is Triton's, in microseconds over
either protocol. TensorRT-LLM's `request_type` says which phases of the output the engine computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from inflight.context_phase import RequestType
from inflight.errors import InvalidRequest
from inflight.request import MAX_ALLOTTED_MS

MAX_SALT_BYTES = 256
MAX_TIMEOUT_US = 2**31 * 1000


def parse_parameters(text: str) -> dict[str, Any]:
    """The parameters from the JSON object that tritonserver hands over."""
    if not text or text == "{}":
        return {}
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest("the request parameters are not a JSON object") from None
    if not isinstance(parameters, dict):
        raise InvalidRequest("the request parameters are not a JSON object")
    return parameters


REQUEST_TYPE = "request_type"
REQUEST_TYPE_OF_MODELS = "triton_trtllm_request_type"
"""The same by models that call this one: tritonserver refuses a client's parameters whose names begin with triton_."""
REQUEST_TYPES = {kind.wire: kind for kind in RequestType}


def read_parameters(parameters: Mapping[str, Any], timeout_us: int = 0) -> dict[str, Any]:
    """Fields of ClientRequest from the parameters and from Triton's own timeout (microseconds, 0 = none).

    request_type: a RequestType; request_priority: 0..1; allotted_time_ms: milliseconds, wins over timeout; cache_salt:
    text.
    """
    values: dict[str, Any] = {}
    for name in (REQUEST_TYPE, REQUEST_TYPE_OF_MODELS):
        if name in parameters:
            values["request_type"] = _request_type(name, parameters[name])
    if timeout_us > 0:
        values["allotted_time_ms"] = math.ceil(timeout_us / 1000)
    if "request_priority" in parameters:
        values["priority"] = _number("request_priority", parameters["request_priority"], 1)
    if "timeout" in parameters:
        values["allotted_time_ms"] = math.ceil(_number("timeout", parameters["timeout"], MAX_TIMEOUT_US) / 1000)
    if "allotted_time_ms" in parameters:
        allotted = _number("allotted_time_ms", parameters["allotted_time_ms"], MAX_ALLOTTED_MS)
        values["allotted_time_ms"] = math.ceil(allotted)
    if "cache_salt" in parameters:
        values["cache_salt"] = _salt(parameters["cache_salt"])
    return values


def _request_type(name: str, value: object) -> RequestType:
    kind = REQUEST_TYPES.get(value) if isinstance(value, str) else None
    if kind is None:
        raise InvalidRequest(f"{name} must be one of {', '.join(REQUEST_TYPES)}")
    return kind


def _number(name: str, value: object, most: float) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= most:
        raise InvalidRequest(f"{name} must be a number between 0 and {most}")
    return number


def _salt(value: object) -> str:
    if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt must be text of at most {MAX_SALT_BYTES} bytes")
    return value
