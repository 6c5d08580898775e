"""A minute of `make chaos` with a few faults: every promise is kept.

pytest ci/L0_chaos
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT = 1500
"""Seconds. Beside its minute it starts a server, asks everything alone, and waits after each fault until all go on,
which takes a slow machine long. Less than pytest waits, so that what was printed is shown."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT + 100)]

ROOT = Path(__file__).resolve().parents[2]
FAULTS = (
    "kill the leader",
    "kill the supervisor",
    "kill the OpenAI server",
    "the leader stops briefly",
    "messages to the stub are late",
    "a client is killed",
    "a storm of cancels",
    "bad requests",
)


def test_no_promise_is_broken_in_a_minute_of_faults() -> None:
    chosen = [word for name in FAULTS for word in ("--fault", name)]
    command = [sys.executable, "-m", "ci.chaos", "--minutes", "1", "--ranks", "1", "--seed", "1", "--no-result"]
    finished = subprocess.run(
        [*command, *chosen],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
