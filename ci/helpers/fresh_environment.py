"""A virtual environment for tests, with nothing in it but what it is given.

What a wheel asks for is not fetched but linked, file by file, from the environment that runs the tests: the packages
that its metadata leads to, and no others. So a program that needs another one fails here as it would anywhere.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ci.installed_packages import holding, needed
from inflight.run_directory import RUN_DIRECTORY

PATIENCE = 300.0


class FreshEnvironment:
    """`folder` is made."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=PATIENCE)
        self.programs = folder / "bin"
        (self._packages,) = (folder / "lib").glob("python3*/site-packages")

    def install(self, wheel: Path) -> None:
        """The wheel by pip, and links to what it asks for."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.programs / "python"), "--disable-pip-version-check"]
        command = [*pip, "install", "--no-deps", "--no-index", str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        name = wheel.name.split("-")[0]
        (installed,) = importlib.metadata.distributions(name=name, path=[str(self._packages)])
        self.link(needed(holding(installed.requires or [])))

    def link(self, packages: Iterable[str]) -> None:
        """Link the files of packages that are installed beside this Python. Those that are not were asked for by an
        extra that none of them needs here."""
        for package in packages:
            distribution = importlib.metadata.distribution(package)
            for file in distribution.files or ():
                place = Path(os.path.normpath(self._packages / file))
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    place.symlink_to(os.path.normpath(str(distribution.locate_file(file))))

    def environment(self) -> dict[str, str]:
        """Variables of a terminal of no colours in which nobody has named other packages."""
        own = {name: value for name, value in os.environ.items() if name not in (RUN_DIRECTORY, "PYTHONPATH")}
        return {**own, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}

    def run(self, program: str, *arguments: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.programs,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
