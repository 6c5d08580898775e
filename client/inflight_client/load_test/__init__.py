"""Load test of a running server: sweeps of concurrency and request rate, and their report. The load comes from NVIDIA's
perf_analyzer, or on a server of OpenAI's API from this process.

    report = run_load_test(LoadTestOptions(levels=parse_sweep("1:16:5", LoadMode.CONCURRENCY)))
    report.levels[0].time_to_first_token.p50

    write_report(report, Path("load-test"))

Modules for plots and tables are imported when they are needed.
"""

from __future__ import annotations

from pathlib import Path

from inflight_client._exceptions import LoadTestError
from inflight_client.load_test.load import Progress
from inflight_client.load_test.openai_load import Endpoint, parse_endpoint
from inflight_client.load_test.prompts import PromptOptions, parse_length
from inflight_client.load_test.report import table, write_json
from inflight_client.load_test.results import LevelResult, Percentiles
from inflight_client.load_test.runner import LoadTestOptions, LoadTestReport, run_load_test
from inflight_client.load_test.server_facts import ServerFacts
from inflight_client.load_test.sweep import Level, LoadMode, parse_sweep


def write_report(report: LoadTestReport, folder: Path) -> None:
    """Write results.json, plot.png and report.html to `folder`. Raises LoadTestError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(report, folder / "results.json")
        _draw(report, folder)
    except OSError as error:
        raise LoadTestError(f"the results cannot be written to {folder}: {error}") from None


def _draw(report: LoadTestReport, folder: Path) -> None:
    try:
        from inflight_client.load_test import page, plot

        plot.write_png(report, folder / "plot.png")
        page.write_page(report, folder / "report.html")
    except ImportError as error:
        raise LoadTestError(f"results.json is in {folder}; to draw it install matplotlib ({error})") from None


__all__ = [
    "Endpoint",
    "Level",
    "LevelResult",
    "LoadMode",
    "LoadTestOptions",
    "LoadTestReport",
    "Percentiles",
    "Progress",
    "PromptOptions",
    "ServerFacts",
    "parse_endpoint",
    "parse_length",
    "parse_sweep",
    "run_load_test",
    "table",
    "write_report",
]
