"""Which code was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def revision() -> str:
    """The commit, marked if files differ from it; empty without git or outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
