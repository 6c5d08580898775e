"""Runs Model Analyzer in a process of its own, and ends with it whatever it has started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from inflight_client._exceptions import LoadTestError, UsageError
from inflight_client.analyze.target import KEY_VARIABLE

PROGRAM = "inflight_client.analyze.program"
INSTALL = "install it with: pip install 'inflight[analyze]'"
_STEP = re.compile(r"\[Model Analyzer\] (Profiling .*|Creating model config: .*|Generating .*)")
_FAILURE = re.compile(r"(?:model_analyzer_exceptions\.\w+: |Model Analyzer encountered an error: )(.+)")


def check_installed() -> None:
    """Raise UsageError if it is not."""
    if importlib.util.find_spec("model_analyzer") is None:
        raise UsageError(f"Model Analyzer is not installed; {INSTALL}")


def profile(settings: Path, *, api_key: str, log: Path, tell: Callable[[str], None]) -> None:
    """Run its command `profile` with this configuration file. Its output goes to the file `log`, and what it does next
    to `tell`. Raises LoadTestError with its reason if it fails."""
    command = [sys.executable, "-m", PROGRAM, "profile", "--config-file", str(settings)]
    # Its temporary files are removed with the folder, also when it is killed.
    environment = {**os.environ, KEY_VARIABLE: api_key, "TMPDIR": str(settings.parent)}
    process = subprocess.Popen(
        command,
        env=environment,
        # A folder for files of its own; a session, because at Ctrl-C it would go on to the end of a measurement.
        cwd=settings.parent,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    reason = ""
    try:
        with log.open("w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(f"{datetime.now():%H:%M:%S} {line}")
                file.flush()
                if step := _STEP.search(line):
                    tell(step[1].strip())
                if failure := _FAILURE.search(line):
                    reason = failure[1].strip()
        process.wait()
    finally:
        _end(process)
    if process.returncode:
        told = reason or f"it ended with code {process.returncode}"
        raise LoadTestError(f"Model Analyzer failed: {told} ({log} has its log)")


def _end(process: subprocess.Popen[str]) -> None:
    """End it and all its descendants, which have sessions of their own, if it runs."""
    import psutil

    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, alive = psutil.wait_procs(family, timeout=5.0)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
