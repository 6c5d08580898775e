"""A report as a table for people and as JSON for scripts."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight_client.load_test.openai_load import Endpoint
from inflight_client.load_test.results import SAMPLES_NEEDED, LevelResult, Percentiles
from inflight_client.load_test.runner import LoadTestReport
from inflight_client.load_test.sweep import LoadMode

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

COLUMNS = (
    "load",
    "requests",
    "req/s",
    "output tok/s",
    "TTFT ms p50 / p90 / p99",
    "inter-token ms p50 / p90 / p99",
    "end-to-end ms p50 / p90 / p99",
)

NOT_STATED = "-"
"""In place of a figure that the samples do not carry."""
_LATENCIES = ("time_to_first_token", "inter_token_latency", "end_to_end_latency")
_LOAD_HEADS = {LoadMode.CONCURRENCY: "concurrent", LoadMode.REQUEST_RATE: "asked\nreq/s"}


def row(result: LevelResult) -> tuple[str, ...]:
    """One level's cells, in the order of COLUMNS."""
    return (
        result.name,
        str(result.num_requests),
        f"{result.requests_per_s:.1f}",
        f"{result.output_tokens_per_s:,.0f}",
        *(" / ".join(_percentiles(getattr(result, latency))) for latency in _LATENCIES),
    )


def sweeps(levels: Sequence[LevelResult]) -> list[list[LevelResult]]:
    """The levels of each mode, by load."""
    by_mode: dict[LoadMode, list[LevelResult]] = {}
    for result in levels:
        by_mode.setdefault(result.mode, []).append(result)
    return [sorted(results, key=lambda result: result.value) for results in by_mode.values()]


def table(report: LoadTestReport) -> Group:
    """Tables for a terminal of 80 columns, one per sweep."""
    from rich.console import Group
    from rich.text import Text

    tables = [_sweep_table(results) for results in sweeps(report.levels)]
    return Group(
        Text(title(report), style="bold"), Text(report.server.sentence()), *tables, *map(Text, remarks(report))
    )


def remarks(report: LoadTestReport) -> list[str]:
    """What a reader of the figures must know: which percentiles are left out, and which requests failed."""
    found = []
    if any(result.lacks_samples for result in report.levels):
        needed = " and ".join(f"{count} for {name}" for name, count in SAMPLES_NEEDED.items() if count > 1)
        found.append(f"{NOT_STATED}: too few samples, it takes {needed}; --requests makes more")
    for result in report.levels:
        total = result.num_requests + result.num_errors
        found += [f"{result.name}: {count} of {total} requests failed, {kind}" for kind, count in result.errors.items()]
    return found


def _sweep_table(results: Sequence[LevelResult]) -> Table:
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    spread = _cells(("p50", "p90", "p99"))
    heads = (_LOAD_HEADS[results[0].mode], "\nreq/s", "output\ntok/s")
    for head in (*heads, f"TTFT ms\n{spread}", f"inter-token ms\n{spread}", f"end-to-end ms\n{spread}"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for result in results:
        latencies = (_percentiles(getattr(result, latency)) for latency in _LATENCIES)
        drawn.add_row(
            f"{result.value:g}",
            f"{result.requests_per_s:.1f}",
            f"{result.output_tokens_per_s:.0f}",
            *(_cells(cells) for cells in latencies),
        )
    return drawn


def title(report: LoadTestReport) -> str:
    return f"{report.options.model} at {report.options.url} — {load_sentence(report)}"


def load_sentence(report: LoadTestReport) -> str:
    """Description of this test's requests, for headings."""
    prompts = report.options.prompts
    unit = "words" if report.options.endpoint is Endpoint.CHAT else "tokens"
    asked = f"{_span(prompts.input_tokens, unit)} in"
    source = f"prompts of {prompts.prompt_file.name}" if prompts.prompt_file else asked
    return f"{source}, {_span(prompts.output_tokens)} out"


def to_json(report: LoadTestReport) -> dict[str, Any]:
    options = report.options
    return {
        "started": report.started.isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "url": options.url,
        "endpoint": options.endpoint.path if options.endpoint else "gRPC",
        "model": options.model,
        "server": report.server.to_dict(),
        "input_tokens": list(options.prompts.input_tokens),
        "output_tokens": list(options.prompts.output_tokens),
        "prompt_file": str(options.prompts.prompt_file) if options.prompts.prompt_file else None,
        "latency_unit": "ms",
        "levels": [_without_nan(result.to_dict()) for result in report.levels],
    }


def write_json(report: LoadTestReport, path: Path) -> None:
    path.write_text(json.dumps(to_json(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _percentiles(values: Percentiles) -> tuple[str, ...]:
    return tuple(_three_digits(value) for value in (values.p50, values.p90, values.p99))


def _cells(values: Sequence[str]) -> str:
    return " ".join(f"{value:>4}" for value in values)


def _three_digits(value: float) -> str:
    if math.isnan(value):
        return NOT_STATED
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _span(bounds: tuple[int, int], unit: str = "tokens") -> str:
    low, high = bounds
    return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
