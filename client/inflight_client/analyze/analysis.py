"""The analysis itself: give Model Analyzer its configuration and prompts, run it, read what it measured, draw it."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inflight_client import perf_analyzer_binary
from inflight_client._exceptions import LoadTestError, UsageError
from inflight_client.analyze import model_analyzer, results
from inflight_client.analyze.results import Analysis
from inflight_client.analyze.target import Target
from inflight_client.analyze.variants import FIXED, Variant, is_configured
from inflight_client.load_test.prompts import PromptOptions, make_prompts
from inflight_client.load_test.tensor_requests import RequestForm, make_requests, write_requests

WINDOWS = 3
"""Windows of one measurement, of so many requests each; perf_analyzer averages over them."""
ROUNDS = 4
"""Requests of a window for each one in flight, so that its start and end weigh little."""
MIN_REQUESTS = 40


@dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    """What is compared, and under which load."""

    variants: Sequence[Variant]
    levels: Sequence[int] = (1, 8, 32)
    """Concurrent requests of each measurement of a variant."""
    num_requests: int = 0
    """Of a window of a measurement; 0 chooses by the highest level."""
    prompts: PromptOptions = field(default_factory=PromptOptions)

    @property
    def window(self) -> int:
        return max(self.num_requests or max(MIN_REQUESTS, ROUNDS * max(self.levels)), max(self.levels))


def run_analysis(
    options: AnalysisOptions,
    target: Target,
    folder: Path,
    *,
    progress: Callable[[str], None] = lambda step: None,
) -> Analysis:
    """Measure every variant, and write the results, a plot and Model Analyzer's report to `folder`.

    `progress` gets what Model Analyzer says that it does next. Raises ClientError, also if a measurement is missing:
    those that were made are in results.json then.
    """
    for variant in options.variants:
        target.check(variant)
    model_analyzer.check_installed()
    _make(folder)
    with _scratch() as scratch, _restored(target):
        inputs, settings, export = scratch / "inputs.json", scratch / "profile.yaml", scratch / "export"
        export.mkdir()
        prompts = make_prompts(options.prompts, WINDOWS * options.window, level="analysis")
        write_requests(make_requests(prompts, options.prompts.temperature, RequestForm.LLM), inputs)
        settings.write_text(json.dumps(_settings(options, target, scratch, inputs, export)), encoding="utf-8")
        try:
            model_analyzer.profile(settings, api_key=target.api_key, log=folder / "model-analyzer.log", tell=progress)
        finally:
            shutil.copytree(export, folder, dirs_exist_ok=True)
        measurements = results.read(folder / "results", scratch / "models", options.variants)
    analysis = Analysis(options=options, target=target, measurements=measurements)
    results.write_json(analysis, folder / "results.json")
    wanted = len(options.variants) * len(options.levels)
    if len(measurements) < wanted:
        raise LoadTestError(
            f"only {len(measurements)} of {wanted} measurements were made; they are in {folder}/results.json, and "
            f"{folder}/model-analyzer.log says why the others were not"
        )
    _draw(analysis, folder)
    return analysis


def _settings(options: AnalysisOptions, target: Target, scratch: Path, inputs: Path, export: Path) -> dict[str, object]:
    """Model Analyzer's configuration file; JSON is YAML. It takes paths apart at blanks, so it gets those of `scratch`
    only."""
    sweep = [
        {key: {"string_value": value} for key, value in (target.parameters | FIXED | variant).items()}
        for variant in options.variants
        # Model Analyzer always measures the configuration that it finds, too.
        if not is_configured(variant, target.parameters)
    ]
    return {
        **target.settings,
        "client_protocol": "grpc",
        "output_model_repository_path": str(scratch / "models"),
        "override_output_model_repository": True,
        "checkpoint_directory": str(scratch / "checkpoints"),
        "export_path": str(export),
        "triton_output_path": str(export / "tritonserver.log"),
        "perf_analyzer_path": str(_perf_analyzer(scratch)),
        "perf_analyzer_cpu_util": 10_000.0,  # percent; it would kill perf_analyzer on a machine with few cores
        "perf_analyzer_flags": {
            "streaming": True,
            "async": True,
            "input-data": str(inputs),
            "measurement-mode": "count_windows",
            "measurement-request-count": options.window,
            "stability-percentage": 999,  # always WINDOWS windows, whatever the machine's noise
        },
        "duration_seconds": 1,  # of looking at a server without load
        "run_config_search_mode": "brute",
        "run_config_search_disable": True,
        "inference_output_fields": list(results.COLUMNS),
        "num_configs_per_model": min(3, len(options.variants)),
        "profile_models": {
            target.model: {
                "parameters": {"concurrency": list(options.levels)},
                **({"model_config_parameters": {"parameters": sweep}} if sweep else {}),
                "objectives": {"perf_throughput": 10},
            }
        },
    }


def _perf_analyzer(scratch: Path) -> Path:
    """A program that is perf_analyzer with its libraries, behind whatever environment Model Analyzer gives it."""
    libraries = shlex.quote(perf_analyzer_binary.environment().get("LD_LIBRARY_PATH", ""))
    binary = shlex.quote(str(perf_analyzer_binary.find()))
    program = scratch / "perf_analyzer"
    program.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {binary} "$@"\n')
    program.chmod(0o700)
    return program


def _make(folder: Path) -> None:
    """Model Analyzer's reports go to the folder too, which must not mix those of two runs."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty: name another folder with --output")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="inflight-analyze-") as folder:
        if any(character.isspace() or character in "=," for character in folder):
            raise UsageError(
                f"Model Analyzer cannot use the temporary folder {folder}: name one without blanks with TMPDIR"
            )
        yield Path(folder)


@contextlib.contextmanager
def _restored(target: Target) -> Iterator[None]:
    try:
        yield
    finally:
        target.restore()


def _draw(analysis: Analysis, folder: Path) -> None:
    from inflight_client.analyze import plot

    plot.write_png(analysis, folder / "plot.png")
