"""The log cannot be filled by a client that does the same wrong thing again and again."""

from __future__ import annotations

import logging

from inflight.log_output import PERIOD_SECONDS, REPEATS, RepeatLimit


def line(text: str, place: int) -> logging.LogRecord:
    return logging.LogRecord("inflight", logging.ERROR, "reply.py", place, text + " %d", (7,), None)


def test_a_place_logs_a_few_lines_a_period_and_then_says_how_many_were_lost() -> None:
    now = [100.0]
    limit = RepeatLimit(lambda: now[0])
    passed = [limit.filter(line("bad", 1)) for _ in range(3 * REPEATS)]
    assert passed == [True] * REPEATS + [False] * 2 * REPEATS
    assert limit.filter(line("other", 2)), "another place has its own lines"
    now[0] += PERIOD_SECONDS
    later = line("bad", 1)
    assert limit.filter(later)
    assert later.getMessage() == f"bad 7 ({2 * REPEATS} more lines like this were dropped)"
    again = line("bad", 1)
    assert limit.filter(again) and again.getMessage() == "bad 7"
