"""A server's run directory: the private directory in which its processes leave files for each other.

The supervisor creates it and passes its path to every process of the server in an environment variable; the variable
also identifies those processes later. Without a supervisor there is no run directory. Knows the paths of the files in
it, not their content.
"""

from __future__ import annotations

import os
from pathlib import Path

RUN_DIRECTORY = "INFLIGHT_RUN_DIR"
"""Environment variable that holds its path."""

UNLOADED = "unloaded"
"""Folder in it, with one file per model whose stub has unloaded the model; the file holds the reason."""

SIGNS = "signs"
"""Folder in it, with one file INSTANCE.PID per stub, whose modification time the stub renews while it is alive."""

OPEN_REQUESTS = "open"
"""Folder in it, with one file INSTANCE.PID per stub, which says how many of its requests have no final response yet."""


def run_directory() -> Path | None:
    """The run directory of this process's server, or None without a supervisor."""
    path = os.environ.get(RUN_DIRECTORY, "")
    return Path(path) if path and Path(path).is_dir() else None
