"""What clients can make a process log is limited in rate and length, and cannot look like another record."""

from __future__ import annotations

import io
import logging

import pytest

from inflight import log_output
from inflight.log_rate import LogRate


class Log:
    """A logger with a handler of its own, whose clock stands still."""

    def __init__(self, count: int = 2) -> None:
        self.now, self.written = 0.0, io.StringIO()
        handler = logging.StreamHandler(self.written)
        handler.setFormatter(log_output._Formatter())
        handler.addFilter(LogRate(count, 60, lambda: self.now))
        self.logger = logging.Logger("test")
        self.logger.addHandler(handler)

    def warn(self, text: str) -> None:
        self.logger.warning("wrong: %s", text)

    def other(self) -> None:
        self.logger.error("other")

    @property
    def lines(self) -> list[str]:
        return [line.partition("test] ")[2] for line in self.written.getvalue().splitlines()]


def test_records_of_one_kind_are_limited_and_counted() -> None:
    log = Log()
    for number in range(5):
        log.warn(str(number))
    log.other()
    assert log.lines == ["wrong: 0", "wrong: 1", "other"]
    log.now = 60
    log.warn("5")
    log.warn("6")
    log.warn("7")
    assert log.lines[3:] == ["wrong: 5 (and 3 times before)", "wrong: 6"]


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.log_rate.MAX_KINDS", 1)
    log = Log(1)
    for _ in range(3):
        log.warn("x")
        log.other()
    assert log.lines == ["wrong: x", "other"] * 3


def test_no_text_makes_a_record_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.log_output.MAX_CHARS", 200)
    log = Log()
    log.warn("a\nE1122 00:00:00.000 inflight] all is lost\rb\x85c\u2028" + "d" * 500)
    first, *others = log.written.getvalue().splitlines()
    assert first.startswith("W") and first.endswith("wrong: a")
    assert others and all(line.startswith("  ") for line in others)
    assert others[-1].endswith("d...") and len("\n".join(others)) < 220
