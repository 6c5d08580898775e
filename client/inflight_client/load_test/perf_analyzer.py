"""Runs NVIDIA's perf_analyzer for one level of load, and checks that its measurements are complete.

An error in any response fails the level.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

from inflight_client import perf_analyzer_binary
from inflight_client._exceptions import LoadTestError
from inflight_client.load_test.sweep import Level, LoadMode

LEVEL_TIMEOUT = 900.0
"""Seconds after which an unfinished level is aborted."""

_PLAIN_ADDRESSES = ("setarch", platform.machine(), "--addr-no-randomize", "--addr-compat-layout")
"""Gives perf_analyzer memory addresses whose bytes are mostly valid numbers in every type; see MeasurementsLost."""
NOT_COUNTED = "failed to find the requested model version"
"""What it says where the server's statistics have counted no execution between its two looks at them."""
_ERROR_LINE = re.compile(r"Thread \[\d+\] had error: (.+)")
_NOISE = re.compile(r"^(\s*$|Request concurrency|Request Rate|\*\*\*|  )")


class MeasurementsLost(LoadTestError):
    """A level ran well, but its measurements were not written, or only in part. Another run usually succeeds.

    For outputs that a response does not have, perf_analyzer exports uninitialised memory, such as bytes of addresses.
    If these bytes, read as a float, are not a number, it stops writing but still exits with code 0. Seen in 3 of 16
    runs of 600 requests, and in 1 of 18 with the address layout of _PLAIN_ADDRESSES.

    It takes the version that it measures from the server's statistics, which may count executions late: seen once, with
    12 requests on a busy machine.
    """


class PerfAnalyzer:
    """The installed perf_analyzer. `scratch` is a folder for inputs and exports that outlives the runs."""

    def __init__(self, scratch: Path) -> None:
        self._binary = (*_address_layout(), str(perf_analyzer_binary.find()))
        self._scratch = scratch
        self._environment = perf_analyzer_binary.environment()

    def run(self, level: Level, *, url: str, model: str, inputs: Path, timeout: float = LEVEL_TIMEOUT) -> Path:
        """Put one level of load on `model` and return the path of the profile export. Raises LoadTestError."""
        export = self._scratch / f"export-{level.mode.value}-{level.value:g}.json"
        export.unlink(missing_ok=True)  # perf_analyzer refuses to write over a file
        command = self.command(level, url=url, model=model, inputs=inputs, export=export)
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, text=True, timeout=timeout, errors="replace"
            )
        except subprocess.TimeoutExpired:
            raise LoadTestError(f"{level.name}: not finished after {timeout:g} s") from None
        if done.returncode != 0:
            reason = failure_reason(done.stdout + "\n" + done.stderr)
            kind = MeasurementsLost if reason == NOT_COUNTED else LoadTestError
            raise kind(f"{level.name}: {reason} (perf_analyzer ended with code {done.returncode})")
        if not export.is_file() or export.stat().st_size == 0:
            raise MeasurementsLost(f"{level.name}: perf_analyzer reported success but wrote no measurements")
        return export

    def command(self, level: Level, *, url: str, model: str, inputs: Path, export: Path) -> list[str]:
        load = {
            LoadMode.CONCURRENCY: ["--concurrency-range", f"{level.value:g}"],
            LoadMode.REQUEST_RATE: ["--request-rate-range", f"{level.value:g}", "--request-distribution", "poisson"],
        }[level.mode]
        return [
            *self._binary,
            *("-m", model, "-u", url, "-i", "grpc", "--streaming", "--async"),
            *load,
            *("--request-count", str(level.num_requests)),
            *("--input-data", str(inputs), "--profile-export-file", str(export)),
        ]


def failure_reason(output: str) -> str:
    """The line in perf_analyzer's output that says what went wrong."""
    errors = _ERROR_LINE.findall(output)
    if errors:
        return str(errors[0]).strip()
    told = output.partition("Usage:")[0]
    lines = [line.strip() for line in told.splitlines() if not _NOISE.match(line)]
    telling = [line for line in lines if re.search(r"fail|error|unable|not found|cannot", line, re.IGNORECASE)]
    return (telling or lines or ["it gave no reason"])[-1]


def _address_layout() -> tuple[str, ...]:
    """The command prefix for this address layout, or nothing if it is not permitted, as in some containers."""
    try:
        done = subprocess.run([*_PLAIN_ADDRESSES, "/bin/true"], capture_output=True, check=False)
    except OSError:
        return ()
    return _PLAIN_ADDRESSES if done.returncode == 0 else ()
