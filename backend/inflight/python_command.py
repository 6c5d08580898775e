"""How to start a Python process with our packages from any process.

tritonserver's stub embeds an interpreter, so sys.executable need not be Python there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from inflight.errors import ConfigurationError

WORKER = ("-m", "inflight.worker")


def find_python() -> Path:
    """The Python interpreter of this environment. Raises ConfigurationError."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = (sys.executable, os.path.join(sys.prefix, "bin", name), shutil.which(name), shutil.which("python3"))
    for candidate in candidates:
        if candidate and Path(candidate).name.startswith("python") and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise ConfigurationError(f"no {name} found to start processes with: put it on PATH")


def worker_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited`, with the folders from which our packages were imported prepended to PYTHONPATH."""
    environment = dict(inherited)
    places = []
    for package in ("inflight", "inflight_kernels"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            places.append(str(Path(spec.submodule_search_locations[0]).parent))
    places += environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(place for place in places if place))
    return environment
