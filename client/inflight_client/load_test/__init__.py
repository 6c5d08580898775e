"""Load test of a running server: sweeps of concurrency and request rate by NVIDIA's perf_analyzer, read and drawn.

    report = run_load_test(LoadTestOptions(levels=parse_sweep("1:16:5", LoadMode.CONCURRENCY)))
    report.levels[0].time_to_first_token.p50

Drawing is in `plot` and `page`, tables in `report`; they are imported when asked for, because they are heavy.
"""

from __future__ import annotations

from inflight_client.load_test.profile import LevelResult, Percentiles
from inflight_client.load_test.prompts import PromptOptions, parse_length
from inflight_client.load_test.runner import LoadTestOptions, LoadTestReport, Progress, run_load_test
from inflight_client.load_test.sweep import Level, LoadMode, parse_sweep

__all__ = [
    "Level",
    "LevelResult",
    "LoadMode",
    "LoadTestOptions",
    "LoadTestReport",
    "Percentiles",
    "Progress",
    "PromptOptions",
    "parse_length",
    "parse_sweep",
    "run_load_test",
]
