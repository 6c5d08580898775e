"""perf_analyzer as tritonclient's wheel carries it: the binary, and the two libraries it asks for.

The libraries lie in nvidia-pytriton's wheel under other names; links to them make the binary run without root.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigurationError

LIBRARIES = {"libcudart.so.12": "libcudart-*.so.12*", "libb64.so.0d": "libb64-*.so.0d"}
"""What the binary asks for -> how the wheel calls it."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """The binary, and the variables it needs beside the caller's own."""

    binary: Path
    environment: dict[str, str]


def find_perf_analyzer(directory: Path) -> PerfAnalyzer:
    """Find the binary and link its libraries into `directory` (made where it is missing).

    Raises ConfigurationError with one sentence if it is not installed.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("perf_analyzer", path=path)
    if found is None:
        raise ConfigurationError(
            f"perf_analyzer is not installed: {sys.executable} -m pip install tritonclient==2.51.0"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for name, pattern in LIBRARIES.items():
        library = next(iter(sorted(_wheel_libraries().glob(pattern))), None)
        link = directory / name
        if library is not None and not link.exists():
            link.symlink_to(library)
    rest = os.environ.get("LD_LIBRARY_PATH")
    return PerfAnalyzer(Path(found), {"LD_LIBRARY_PATH": f"{directory}:{rest}" if rest else str(directory)})


def _wheel_libraries() -> Path:
    wheel = importlib.util.find_spec("pytriton")
    places = list(wheel.submodule_search_locations or ()) if wheel else []
    return Path(places[0]).parent / "nvidia_pytriton.libs" if places else Path(os.devnull)
