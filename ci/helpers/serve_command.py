"""`inflight` as a user types it, and `inflight serve` as a process that runs until it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from inflight.run_directory import RUN_DIRECTORY

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "inflight_client.cli"]
PATIENCE = 300.0
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def environment() -> dict[str, str]:
    """A terminal of no colours, with this source tree."""
    sources = os.pathsep.join(str(ROOT / folder) for folder in ("backend", "kernels", "client"))
    kept = {name: value for name, value in os.environ.items() if name != RUN_DIRECTORY}
    return {**kept, "PYTHONPATH": sources, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}


def inflight(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], input=text, capture_output=True, text=True, env=environment(), timeout=PATIENCE
    )


class Serving:
    """`inflight serve`, on free ports unless told otherwise, with what it printed so far."""

    def __init__(self, *arguments: str, ports: Sequence[str] = FREE_PORTS) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *ports, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        self.output = ""
        self._watchdog = threading.Timer(PATIENCE, self.process.kill)
        self._watchdog.start()

    def read_until(self, words: str) -> str:
        """The output up to the line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if words in line:
                self._watchdog.cancel()
                return self.output
        raise AssertionError(f"it ended without saying {words!r}:\n{self.output}")

    def interrupt(self) -> int:
        """Ctrl-C, as the terminal sends it; the exit code."""
        self.process.send_signal(signal.SIGINT)
        rest, _ = self.process.communicate(timeout=PATIENCE)
        self.output += rest
        return self.process.returncode

    def close(self) -> None:
        self._watchdog.cancel()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
