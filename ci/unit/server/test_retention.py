"""KV cache retention: from tensors into a request."""

from __future__ import annotations

import numpy as np
import pytest
from llm_tensors import OK, build

from inflight.errors import InvalidRequest
from inflight.kv_cache_retention import KvCacheRetentionConfig, TokenRangeRetentionConfig


def test_retention_is_read_by_ranges() -> None:
    request = build(
        {
            **OK,
            "retention_token_range_starts": np.array([0, 8], np.int32),
            "retention_token_range_ends": np.array([8, -1], np.int32),
            "retention_token_range_priorities": np.array([90, 10], np.int32),
            "retention_token_range_durations_ms": np.array([-1, 500], np.int32),
            "retention_decode_duration_ms": 20,
        }
    )
    first = TokenRangeRetentionConfig(token_start=0, token_end=8, priority=90)
    second = TokenRangeRetentionConfig(token_start=8, priority=10, duration_ms=500)
    assert request.kv_cache_retention_config == KvCacheRetentionConfig(
        token_range_retention_configs=[first, second], decode_retention_priority=35, decode_duration_ms=20
    )
    assert build(OK).kv_cache_retention_config is None


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            {"retention_token_range_starts": np.array([0], np.int32)},
            "must have an entry for each range; they have 1, 0",
        ),
        ({"retention_decode_priority": 101}, "retention_decode_priority must be between 0 and 100, got 101"),
        ({"retention_decode_duration_ms": 0}, "must be at least 1 ms, got 0"),
    ],
)
def test_a_wrong_retention_is_refused(inputs: dict, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build({**OK, **inputs})
    assert sentence in str(caught.value)
