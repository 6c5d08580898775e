"""A compiler for aarch64 and an emulator of it for tests: `make aarch64` fetches them, or they are installed.

Knows nothing of what is compiled.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from sources import ROOT

FETCHED = ROOT / "build" / "aarch64"


@dataclass(frozen=True)
class Toolchain:
    root: Path
    """What holds usr/."""
    compiler: str
    emulator: str

    def compile(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """By g++."""
        libraries = os.pathsep.join(str(path.parent) for path in self.root.glob("usr/lib/*/libbfd-*-arm64.so"))
        command = [self.compiler, f"--sysroot={self.root}", *arguments]
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def run(self, program: Path) -> str:
        """Its output, on a processor that has every instruction that the emulator knows."""
        command = [self.emulator, "-cpu", "max", "-L", str(self.root / "usr" / "aarch64-linux-gnu"), str(program)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def find() -> Toolchain:
    """Skips the test if there is none."""
    for root in (Path("/"), FETCHED):
        compilers = sorted(root.glob("usr/bin/aarch64-linux-gnu-g++*"))
        emulators = sorted(root.glob("usr/bin/qemu-aarch64*"))
        if compilers and emulators:
            return Toolchain(root, str(compilers[0]), str(emulators[-1]))
    pytest.skip("cannot compile here for aarch64: `make aarch64` fetches a compiler where apt has the packages")
