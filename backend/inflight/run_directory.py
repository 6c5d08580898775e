"""A server's private directory: how its processes know of it, and what they leave in it for each other.

The supervisor makes it and names it to every process of the server by a variable, which is also the mark by which those
processes are found again. Without a supervisor there is none. Knows nobody's files but their places.
"""

from __future__ import annotations

import os
from pathlib import Path

RUN_DIRECTORY = "INFLIGHT_RUN_DIR"
"""Variable that holds its path."""

LOST = "lost"
"""Folder in it: a file named after a model says why its stub has given that model up."""

SIGNS = "signs"
"""Folder in it: a file INSTANCE.PID whose time a stub renews for as long as it is alive."""


def run_directory() -> Path | None:
    """This process's own; None where there is none."""
    path = os.environ.get(RUN_DIRECTORY, "")
    return Path(path) if path and Path(path).is_dir() else None
