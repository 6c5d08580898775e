"""Puts libraries that were built ahead into the wheel, which is then for Linux on this machine's architecture alone.

`make dist` and the Dockerfile name their folder in INFLIGHT_LIBRARIES. Without any, as where pip builds the sdist, the
wheel is for all machines, and compiles at the first start. With some its tag is none of manylinux, though glibc 2.14 is
enough: those allow no libgomp.so.1 outside the wheel, and this one must be torch's.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltLibraries(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("INFLIGHT_LIBRARIES")
        libraries = sorted(Path(folder).glob("*.so")) if folder else []
        if libraries and version == "standard":
            places = {str(each.resolve()): f"inflight_kernels/cpu/libraries/{each.name}" for each in libraries}
            build_data["force_include"].update(places)
            build_data.update(pure_python=False, tag=f"py3-none-linux_{platform.machine()}")
