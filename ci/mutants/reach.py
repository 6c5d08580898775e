"""Which tests execute which lines, and how long they take: recorded in minutes, and kept for the same sources."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from threading import Lock

from coverage import CoverageData

from ci.mutants.faults import SOURCES, Place
from ci.mutants.reach_plugin import FOLDER, TEST
from ci.mutants.trials import FUZZ_EXAMPLES

SETTINGS = """[run]
data_file = {folder}/reach
parallel = true
sigterm = true
disable_warnings = no-data-collected, module-not-measured, no-ctracer
context = ${{{test}-}}
include =
{include}
"""
FAST, SLOW = "not slow", "slow"
"""Expressions of pytest's `-m`."""


class Reach:
    """The tests that execute each line, with their seconds."""

    def __init__(self, folder: Path, root: Path) -> None:
        """Reads what was recorded of the tree `root`; tests that failed are left out."""
        self.seconds: dict[str, float] = {}
        failed: set[str] = set()
        for file in sorted(folder.glob("tests-*.json")):
            record = json.loads(file.read_text(encoding="utf-8"))
            self.seconds |= record["seconds"]
            failed |= set(record["failed"])
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._imported: dict[str, set[int]] = defaultdict(set)
        for file in sorted(folder.glob("reach.*")):
            data = CoverageData(str(file))
            data.read()
            for measured in data.measured_files():
                if Path(measured).is_relative_to(root):
                    lines = self._lines[str(Path(measured).relative_to(root))]
                    imported = self._imported[str(Path(measured).relative_to(root))]
                    for line, tests in data.contexts_by_lineno(measured).items():
                        lines[line].update(test for test in tests if "::" in test and test not in failed)
                        if not all("::" in test for test in tests):
                            imported.add(line)

    def tests_of(self, path: str, place: Place) -> set[str]:
        """Those that execute the place's line, else its statement; of what runs at import, all: whichever reads what it
        left behind."""
        lines = self._lines.get(path, {})
        if not place.in_function or place.node.lineno in self._imported[path]:
            return set(self.seconds)
        return lines.get(place.node.lineno) or set().union(*(lines.get(line, set()) for line in place.lines))


class Records:
    """Of a tree, made when they are first asked for."""

    def __init__(self, root: Path, folder: Path, *, with_slow: bool) -> None:
        self._root = root
        self._folder = folder
        self._with_slow = with_slow
        self._lock = Lock()
        self._read: dict[str, Reach] = {}

    @property
    def fast(self) -> Reach:
        return self._of(FAST)

    @property
    def slow(self) -> Reach | None:
        return self._of(SLOW) if self._with_slow else None

    def _of(self, mark: str) -> Reach:
        with self._lock:
            if mark not in self._read:
                folder = self._folder / f"reach-{mark.replace(' ', '-')}-{digest(self._root)}"
                if not (folder / "done").exists():
                    print(f'recording which lines the unit tests "{mark}" execute …', flush=True)
                    shutil.rmtree(folder, ignore_errors=True)
                    _record(self._root, folder, mark)
                self._read[mark] = Reach(folder, self._root)
            return self._read[mark]


def _record(root: Path, folder: Path, mark: str) -> None:
    folder.mkdir(parents=True)
    include = "\n".join(f"    {root / source}/*" for source in SOURCES)
    (folder / "coverage.ini").write_text(SETTINGS.format(folder=folder, test=TEST, include=include), encoding="utf-8")
    packages = [str(root / name) for name in ("backend", "kernels", "client")]
    environment = {
        **os.environ,
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join([*packages, str(Path(__file__).parent)]),
        "INFLIGHT_FUZZ_EXAMPLES": FUZZ_EXAMPLES,
        "OMP_NUM_THREADS": "1",
    }
    options = ["-p", "reach_plugin", "-p", "no:cacheprovider", "-q", "-n", "2", "--dist", "loadfile", "-m", mark]
    code = subprocess.run([sys.executable, "-m", "pytest", *options, "ci/unit"], cwd=root, env=environment).returncode
    if code not in (0, 1):
        raise SystemExit(f"the unit tests could not be run: pytest ended with {code}")
    (folder / "done").touch()


def digest(root: Path) -> str:
    """Of all Python files that decide what tests reach and find."""
    found = hashlib.sha256()
    for folder in (*SOURCES, "ci/helpers", "ci/kernels", "ci/unit"):
        for path in sorted((root / folder).rglob("*.py")):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()[:12]
