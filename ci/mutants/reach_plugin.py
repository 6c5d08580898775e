"""A pytest plugin (`-p reach_plugin`) that records with coverage.py which lines each test executes.

The folder that `INFLIGHT_REACH` names holds coverage.py's settings, and gets a record from each process, those that
tests start included. The module is imported by itself, and `reach.py` reads the records.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = "INFLIGHT_REACH"
TEST = "INFLIGHT_REACH_TEST"
"""Read by coverage.py in processes that a test starts, as its settings say."""


class Recorder:
    """Of one process that runs tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings = str(folder / "coverage.ini")
        self._coverage = coverage.Coverage(config_file=self._settings)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        os.environ["COVERAGE_PROCESS_START"] = self._settings  # coverage.py's own .pth reads it
        os.environ[TEST] = item.nodeid
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Workers of pytest-xdist are ended before they would unconfigure."""
        seconds = {test: round(each, 3) for test, each in self._seconds.items()}
        record = json.dumps({"seconds": seconds, "failed": sorted(self._failed)})
        (self._folder / f"tests-{os.getpid()}.json").write_text(record, encoding="utf-8")
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))
