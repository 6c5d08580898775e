"""A process that has imported what takes seconds, and forks one process for each run of tests.

It is run as a file; its arguments are the folder that holds the private tree, and the names of modules, which start no
thread. It imports nothing of this repository: each fork imports what the tree holds at that time. A request is one line
of JSON on standard input, its answer one on standard output; at the end of the input it ends. `trials.py` talks to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROKEN = 70
"""Exit code of a trial that says nothing about the tests."""
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Watch:
    """A plugin of pytest that runs the wanted tests in their order and writes down what happens, line by line."""

    def __init__(self, wanted: list[str], events: Path) -> None:
        """`wanted`: ids of tests; where none of them is there, all that were collected are run."""
        self._order = {test: place for place, test in enumerate(wanted)}
        self._events = events.open("w")

    def _tell(self, **event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept = [item for item in items if item.nodeid in self._order]
        if kept:
            items[:] = sorted(kept, key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(failed=report.nodeid, when="collection", why=str(report.longrepr)[-300:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(started=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._tell(failed=report.nodeid, when=report.when, why=str(report.longrepr)[-300:])


def run(request: dict[str, Any], place: Path) -> dict[str, Any]:
    """Run the tests `tests` of the files `files` until one fails or `limit` seconds have passed."""
    tree = (place / "tree").resolve()
    events, log = place / "events.jsonl", place / "trial.log"
    events.unlink(missing_ok=True)
    folder = tempfile.mkdtemp(prefix="trial-")
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_a_trial(request, tree, events, log, folder)
    status, is_over = None, False
    while status is None and not is_over:
        ended, found = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = found
        else:
            is_over = time.monotonic() - began > request["limit"]
            time.sleep(0.02)
    _end_children()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)  # examples that failed with another fault
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    started = [event["started"] for event in told if "started" in event]
    seconds = round(time.monotonic() - began, 1)
    answer = {"seconds": seconds, "tests": len(started), "failed": None, "when": "", "why": ""}
    failed = [event for event in told if "failed" in event]
    if failed:
        return {**answer, **failed[0]}
    if is_over:
        return {**answer, "failed": started[-1] if started else "", "when": "time limit"}
    assert status is not None
    code = os.waitstatus_to_exitcode(status)
    if code < 0 or code == 3:
        return {**answer, "failed": started[-1] if started else "", "when": "crash", "why": f"exit code {code}"}
    if code == BROKEN:
        return {**answer, "error": _tail(log)}
    if code in (2, 4):
        return {**answer, "failed": ", ".join(request["files"][:3]), "when": "collection", "why": _tail(log)}
    if code == 5 or code == 0:
        return answer
    return {**answer, "failed": "", "when": "crash", "why": f"exit code {code}: {_tail(log)}"}


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")[-300:]
    return ""


def _be_a_trial(request: dict[str, Any], tree: Path, events: Path, log: Path, folder: str) -> None:
    code = BROKEN
    try:
        os.setsid()
        for number, path in ((0, "/dev/null"), (1, str(log)), (2, str(log))):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(path, flags, 0o600), number)
        os.chdir(tree)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        packages = [str(tree / name) for name in ("backend", "kernels", "client")]
        os.environ["PYTHONPATH"] = os.pathsep.join(packages)  # before what is installed, also for processes of tests
        sys.path[:0] = [str(tree), *packages]
        sys.modules["__main__"] = types.ModuleType("__main__")  # which spawned processes would otherwise import
        importlib.invalidate_caches()
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", *request["options"]]
        found = int(pytest.main([*options, *request["files"]], plugins=[Watch(request["tests"], events)]))
        for name in ("inflight", "inflight_kernels", "inflight_client"):
            module = sys.modules.get(name)
            if module is not None and not str(module.__file__).startswith(str(tree)):
                raise ImportError(f"{name} is {module.__file__}, not that of {tree}")
        code = found
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _children() -> Iterator[int]:
    """All processes below this one."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    waiting = [os.getpid()]
    while waiting:
        found = parents.get(waiting.pop(), [])
        yield from found
        waiting += found


def _end_children() -> None:
    """What a trial left behind becomes a child of this process, which it is killed and waited for as."""
    for _ in range(100):
        pids = list(_children())
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for _ in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)


def _preload(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as empty:  # imports its plugins too
        pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", empty, empty])


def main(place: Path, names: list[str]) -> None:
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    _preload(names)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads run, and a fork would keep only one of them"
    ours = [name for name in sys.modules if name.partition(".")[0] in ("ci", "inflight", "inflight_kernels")]
    assert not ours, f"{ours} would not be imported from the private tree"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line), place)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
