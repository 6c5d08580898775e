"""Request parameters beside the tensors."""

from __future__ import annotations

import json

import pytest

from inflight.context_phase import RequestType
from inflight.errors import InvalidRequest
from inflight.server.tensors import request_parameters


def read_parameters(text: str, timeout_us: int = 0) -> dict:
    return request_parameters.read_parameters(request_parameters.parse_parameters(text), timeout_us)


def test_parameters_beside_the_tensors() -> None:
    assert read_parameters('{"priority": 7, "Streaming": true, "triton_x": 1, "other": [1]}') == {}
    kind = RequestType.CONTEXT_ONLY
    for name in ("request_type", "triton_trtllm_request_type"):
        assert read_parameters(json.dumps({name: "context_only"})) == {"request_type": kind}
    assert read_parameters('{"timeout": 2500}') == {"allotted_time_ms": 3}
    assert read_parameters('{"request_priority": "0.25", "cache_salt": "me"}') == {"priority": 0.25, "cache_salt": "me"}
    assert read_parameters("{}", timeout_us=1500) == {"allotted_time_ms": 2}
    assert read_parameters('{"allotted_time_ms": 7}', timeout_us=1500) == {"allotted_time_ms": 7}


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        "[" * 200_000,
        '{"request_priority": 2}',
        '{"request_priority": NaN}',
        '{"timeout": -1}',
        '{"allotted_time_ms": "x"}',
        '{"allotted_time_ms": -1}',
        '{"cache_salt": 7}',
        '{"triton_trtllm_request_type": "context"}',
        '{"request_type": 1}',
        '{"cache_salt": "%s"}' % ("x" * 300),
    ],
)
def test_wrong_parameters_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_parameters(text)
