"""The benchmark of the host's work runs, with and without a queue."""

from __future__ import annotations

import pytest

from ci.bench.host_work import MAX_TOKENS, measure


@pytest.mark.parametrize("num_queued", [0, 50])
def test_every_case_is_measured(num_queued: int) -> None:
    """So long that sequences end and others take their rows."""
    case = measure(2, num_queued, MAX_TOKENS + 20)
    assert (case["batch"], case["queued"]) == (2, num_queued)
    assert case["preparation"] > 0 and 0 < case["p50"] <= case["p99"]
