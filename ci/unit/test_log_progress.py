"""What the log says of something that takes long.

pytest ci/unit/test_log_progress.py
"""

from __future__ import annotations

import logging

import pytest

from inflight.log_progress import SECONDS_BETWEEN_LINES, LogProgress


def lines(caplog: pytest.LogCaptureFixture, seconds_each: float) -> list[str]:
    times = iter([0.0, *(seconds_each * number for number in range(1, 7))])
    with caplog.at_level(logging.INFO):
        progress = LogProgress(logging.getLogger("progress"), "tensors are read", 6, lambda: next(times))
        for number in range(1, 7):
            progress.note(number)
    return [record.getMessage() for record in caplog.records]


def test_what_is_done_soon_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, SECONDS_BETWEEN_LINES / 7) == []


def test_what_takes_long_is_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, SECONDS_BETWEEN_LINES / 2) == [
        "2 of 6 tensors are read after 10 s",
        "4 of 6 tensors are read after 20 s",
        "6 of 6 tensors are read after 30 s",
    ]
