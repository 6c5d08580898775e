"""What Model Analyzer measured, by variant: read from its table, as JSON and as a table for the terminal."""

from __future__ import annotations

import csv
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight_client._exceptions import LoadTestError
from inflight_client.analyze.target import Target
from inflight_client.analyze.variants import Variant, differing, is_configured

if TYPE_CHECKING:
    from rich.table import Table

    from inflight_client.analyze.analysis import AnalysisOptions

COLUMNS = (
    "model_name",
    "concurrency",
    "model_config_path",
    "perf_throughput",
    "perf_latency_avg",
    "perf_latency_p90",
    "perf_latency_p99",
)
"""Model Analyzer's names of the columns that it writes, in this order."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One variant at one concurrency."""

    variant: Variant
    config: str
    """Model Analyzer's name of the variant, as in its report."""
    concurrency: int
    requests_per_s: float
    latency_mean: float
    latency_p90: float
    latency_p99: float
    """Milliseconds from a request to its last response."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All measurements, best first."""

    options: AnalysisOptions
    target: Target
    measurements: Sequence[Measurement]

    def tokens_per_s(self, measurement: Measurement) -> float:
        """Output tokens a second: every request has the same length on average."""
        low, high = self.options.prompts.output_tokens
        return measurement.requests_per_s * (low + high) / 2


def read(folder: Path, models: Path, variants: Sequence[Variant]) -> list[Measurement]:
    """The measurements of these variants in Model Analyzer's table, best first. `folder`: its results; `models`: the
    folder of the configurations that it wrote. Raises LoadTestError."""
    path = folder / "metrics-model-inference.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in list(csv.reader(file))[1:] if len(row) == len(COLUMNS)]
    except OSError as error:
        raise LoadTestError(f"Model Analyzer wrote no results: {error}") from None
    measurements = []
    for row in rows:
        values = dict(zip(COLUMNS, row, strict=True))
        parameters = _parameters(models / values["model_config_path"] / "config.pbtxt")
        for variant in variants:
            if is_configured(variant, parameters):
                measurements.append(_measurement(variant, values))
                break
    return sorted(measurements, key=lambda each: -each.requests_per_s)


def _measurement(variant: Variant, values: dict[str, str]) -> Measurement:
    return Measurement(
        variant=variant,
        config=values["model_config_path"],
        concurrency=int(values["concurrency"]),
        requests_per_s=float(values["perf_throughput"]),
        latency_mean=float(values["perf_latency_avg"]),
        latency_p90=float(values["perf_latency_p90"]),
        latency_p99=float(values["perf_latency_p99"]),
    )


def _parameters(path: Path) -> dict[str, str]:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}


def write_json(analysis: Analysis, path: Path) -> None:
    prompts = analysis.options.prompts
    content: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"processor": platform.machine(), "kernel": platform.release()},
        "checkpoint": analysis.target.parameters.get("gpt_model_path", ""),
        "input_tokens": list(prompts.input_tokens),
        "output_tokens": list(prompts.output_tokens),
        "requests_of_a_window": analysis.options.window,
        "measurements": [
            {
                "config": each.config,
                **each.variant,
                "concurrency": each.concurrency,
                "requests_per_s": each.requests_per_s,
                "output_tokens_per_s": analysis.tokens_per_s(each),
                "latency_ms": {"mean": each.latency_mean, "p90": each.latency_p90, "p99": each.latency_p99},
            }
            for each in analysis.measurements
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def table(analysis: Analysis) -> Table:
    """All measurements, highest throughput first; parameters that have one value stand below."""
    from rich.table import Table

    first, names = analysis.options.variants[0], differing(analysis.options.variants)
    same = ", ".join(f"{name} {value}" for name, value in first.items() if name not in names)
    shown = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), caption=same or None)
    shown.caption_justify = "left"
    for name in ("configuration", *names, "in flight", "tokens/s", "p99 ms"):
        # Names are broken where they can be, and of the values only those of the policy.
        policy = name == "batch_scheduler_policy"
        shown.add_column(
            re.sub(r"(?<=[_ /])", "\n", name),
            justify="left" if policy or name == "configuration" else "right",
            vertical="bottom",
            no_wrap=not policy,
            min_width=10 if policy else None,
            overflow="fold",
        )
    for each in analysis.measurements:
        shown.add_row(
            each.config,
            *(each.variant[name] for name in names),
            str(each.concurrency),
            f"{analysis.tokens_per_s(each):.0f}",
            f"{each.latency_p99:.0f}",
        )
    return shown
