"""Leaves out test files whose results follow from files and versions alone, and that passed with the same ones.

Such a file's digest is that of its closure (`closures.py`), of the versions of Python and of the libraries that it
imports, and of the kind of run: the marker expression that chose its tests and the kind of processor. It is noted when
all its tests passed: in the user's cache folder, one file for each digest, and with `--green keep` also in
`ci/green.json`, which is committed for machines without such a cache. Another version gives another digest, so what is
kept there holds only where the same versions are. To keep what passed before takes no second run.

A file's tests must all have been chosen and have run: with `-k`, or where a file or a test is named, nothing is left
out and nothing is noted. Nor is a file noted of which a test was skipped because a tool is not installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from functools import cache, cached_property
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from closures import Closure, Tree

FUNCTIONS_OF_FILES = ("ci/kernels/", "ci/unit/gpu/", "ci/unit/guides/", "ci/unit/kernels/", "ci/unit/models/")
"""Folders whose tests compute: with the interpreter or compilers of triton, on a fake GPU, in C++ and torch, or of
guides their grammars. Their results depend on nothing of the machine but its processor."""
RACING = ("ci/unit/kernels/test_collectives.py", "ci/unit/models/test_compiled_ranks.py")
"""Of their files those whose ranks wait for each other in shared memory: one run does not try all that may happen."""
KEPT = "ci/green.json"
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CXX",
    "INFLIGHT_CPU_INSTRUCTION",
    "INFLIGHT_CPU_VARIANT",
    "INFLIGHT_REFERENCES",
    "NPY_DISABLE_CPU_FEATURES",
    "PYTEST_SEED",
)
"""Variables that decide what is computed."""
LACKS = ("Skipped: cannot compile here", "Skipped: there is no")
"""What the reasons of skipped tests begin with that another machine with the same processor may run."""
IN_CPP = ", C++ for "
"""In the name of a kind of run, before the sets of instructions; of files that C++ has no part in, nothing."""
MOST_NOTES = 2000
"""Digests in the cache; beyond, the oldest half goes."""


class GreenRuns:
    """The plugin, in the process that runs the tests or, with xdist, in the controller and in each worker."""

    def __init__(self, config: pytest.Config, root: Path) -> None:
        self._mode: str = config.getoption("--green")
        self._markers: str = config.option.markexpr
        self._root = root
        self._closures: dict[str, Closure] = {}
        self._digests: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        """Test file -> why it is not run."""
        self._collected: dict[str, set[str]] = defaultdict(set)
        self._ended: dict[str, set[str]] = defaultdict(set)
        self._unproved: set[str] = set()
        """A test of theirs failed or could not run."""
        chosen: dict[str, str] | None = getattr(config, "workerinput", {}).get("left_out")
        self._is_worker = chosen is not None
        if chosen is not None:
            self.left_out = chosen
        elif not chooses_tests(config):
            self._find(config)

    def _find(self, config: pytest.Config) -> None:
        folders = [Path(config.invocation_params.dir, each).resolve() for each in config.args]
        content_digest.cache_clear()
        tree = Tree(self._root)
        for test in tree.tests():
            path = self._root / test
            is_ours = test.startswith(FUNCTIONS_OF_FILES) and test not in RACING
            if is_ours and any(path.is_relative_to(folder) for folder in folders):
                self._closures[test] = closure = tree.closure(test)
                self._digests[test] = self._digest(test, closure, self._kind(closure))
                if self._mode != "run" and (reason := self._passed(test)):
                    self.left_out[test] = reason

    def _kind(self, closure: Closure) -> str:
        """Of this run, for a test file."""
        kind = " -m ".join(filter(None, [processor(), self._markers]))
        return f"{kind}{IN_CPP}{instruction_sets()}" if has_cpp(closure) else kind

    def _digest(self, test: str, closure: Closure, kind: str) -> str:
        digest = hashlib.blake2b(digest_size=16)
        compilers = [compiler()] if has_cpp(closure) else []
        made_with = (test, kind, *versions(closure.libraries), *compilers)
        for part in (*made_with, *self._contents(closure.files)):
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()

    def _contents(self, files: frozenset[str]) -> Iterator[str]:
        """Each file's name and digest. What is kept of green runs is no part of what they depend on."""
        yield from (f"{name} {content_digest(self._root / name)}" for name in sorted(files - {KEPT}))

    def _passed(self, test: str) -> str:
        """Where it is noted that the file passed; "" where it is not."""
        note = self._cache / self._digests[test] if self._cache else None
        if note and note.is_file():
            os.utime(note)
            return f"passed with the same files and versions on {note.read_text(encoding='utf-8').split()[0]}"
        return f"passed with the same files and versions, says {KEPT}" if self._is_kept(test) else ""

    def _is_kept(self, test: str) -> bool:
        closure = self._closures[test]
        here = self._kind(closure)
        kept = self._kept.get(test, {}).items()
        return any(stands_for(kind, here) and digest == self._digest(test, closure, kind) for kind, digest in kept)

    @cached_property
    def _kept(self) -> dict[str, dict[str, str]]:
        """Test file -> kind of run -> digest."""
        path = self._root / KEPT
        return json.loads(path.read_text(encoding="utf-8"))["digests"] if path.is_file() else {}

    @cached_property
    def _cache(self) -> Path | None:
        from inflight_kernels.cache_folder import cache_folder

        try:
            return cache_folder("green")
        except OSError:
            return None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Of xdist: the workers collect the same tests."""
        node.workerinput["left_out"] = self.left_out

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        is_ours = collection_path.is_relative_to(self._root)
        return True if is_ours and collection_path.relative_to(self._root).as_posix() in self.left_out else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._expect(iter(ids))

    def _expect(self, ids: Iterator[str]) -> None:
        for each in ids:
            self._collected[each.partition("::")[0]].add(each)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        if report.failed or (isinstance(report.longrepr, tuple) and report.longrepr[2].startswith(LACKS)):
            self._unproved.add(path)
        if report.when == "teardown":
            self._ended[path].add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_worker:
            return
        if self.left_out and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        content_digest.cache_clear()
        green = {
            test: digest
            for test, digest in self._digests.items()
            if self._collected[test]
            and self._collected[test] == self._ended[test]
            and test not in self._unproved
            # What was changed while the tests ran is not what they ran with.
            and self._digest(test, closure := self._closures[test], self._kind(closure)) == digest
        }
        self._note(green)
        if self._mode == "keep":
            self._keep(green)

    def _note(self, green: dict[str, str]) -> None:
        if self._cache is None:
            return
        for digest in green.values():
            unfinished = self._cache / f"{digest}.{os.getpid()}"
            unfinished.write_text(f"{datetime.now():%Y-%m-%d %H:%M}\n", encoding="utf-8")
            unfinished.replace(self._cache / digest)
        notes = sorted(self._cache.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in notes[: MOST_NOTES // 2] if len(notes) > MOST_NOTES else []:
            old.unlink(missing_ok=True)

    def _keep(self, green: dict[str, str]) -> None:
        """What `ci/green.json` says of other kinds of runs stays; of files that are gone, nothing does."""
        kept = {test: dict(digests) for test, digests in self._kept.items() if (self._root / test).is_file()}
        for test, digest in self._digests.items():
            kind, of_test = self._kind(self._closures[test]), kept.setdefault(test, {})
            if test in green or (test in self.left_out and not self._is_kept(test)):
                of_test[kind] = digest
            elif test not in self.left_out:
                of_test.pop(kind, None)
        libraries = frozenset(name for closure in self._closures.values() for name in closure.libraries)
        record = {
            "made with": list(versions(libraries)),
            "digests": {test: kept[test] for test in sorted(kept) if kept[test]},
        }
        (self._root / KEPT).write_text(f"{json.dumps(record, indent=1)}\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in told(self.left_out, list(self._digests)):
            terminalreporter.write_line(line)


def chooses_tests(config: pytest.Config) -> bool:
    """Whether the run is of some tests of a file, or of files that are named."""
    options = config.option
    chosen = (options.keyword, options.deselect, getattr(options, "lf", False), options.collectonly)
    return any(chosen) or any("::" in each or each.endswith(".py") for each in config.args)


def told(left_out: dict[str, str], asked: list[str]) -> list[str]:
    """A line for the files of each folder that were not run. `asked`: all that could have been left out."""
    files: dict[tuple[str, str], int] = defaultdict(int)
    for test, reason in left_out.items():
        files[folder_of(test), reason] += 1
    lines = []
    for (folder, reason), count in sorted(files.items()):
        total = sum(folder_of(test) == folder for test in asked)
        number = "" if count == total else f" ({count} of {total} files)"
        lines.append(f"not run: {folder}{number}: {reason}")
    return [*lines, "make test-full runs them all"] if lines else []


def folder_of(test: str) -> str:
    return f"{test.rpartition('/')[0]}/"


def has_cpp(closure: Closure) -> bool:
    return any(name.endswith(".cpp") for name in closure.files)


def stands_for(kept: str, here: str) -> bool:
    """Whether what passed in the kind of run `kept` holds in the kind `here`: with at least its sets of instructions,
    which the tests of C++ try each and which give the same bits, but for the order of sums of AMX."""
    (kept_run, _, kept_sets), (run, _, sets) = kept.partition(IN_CPP), here.partition(IN_CPP)
    tried, wanted = set(kept_sets.split()), set(sets.split())
    return kept_run == run and wanted <= tried and not {"amx"} & (tried ^ wanted)


def versions(libraries: frozenset[str]) -> Iterator[str]:
    yield f"python {platform.python_version()}"
    yield from (f"{name} {os.environ[name]}" for name in ENVIRONMENT if name in os.environ)
    for library in sorted(libraries):
        for name in sorted(set(distributions().get(library, ()))):
            yield f"{name} {version(name)}"


@cache
def distributions() -> dict[str, list[str]]:
    """First name of a module -> the installed packages that have it."""
    return dict(packages_distributions())


@cache
def processor() -> str:
    """What torch chooses its functions by; a GPU by its name."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {device}"


@cache
def instruction_sets() -> str:
    """That C++ is compiled for and this processor has, by their names."""
    from inflight_kernels.cpu.variants import variants_here

    return " ".join(each.name for each in variants_here())


@cache
def compiler() -> str:
    """Of C++."""
    try:
        command = [*shlex.split(os.environ.get("CXX") or "g++"), "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


@cache
def content_digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
