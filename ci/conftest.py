"""Set-up of all tests: time limits, the server that is shared by tests which leave it unchanged, what is left out
because it passed before, and the summary at the end of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from server_process import ServerProcess

# Before torch is imported. A test's second thread gets no core to itself while other files' tests run: threads that
# wait for each other by spinning took ten times the processor's time of those that sleep. No result depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "build" / "peers"))  # for machines on which the engine's packages are not installed

SLOW = 600
"""Seconds for a test that loads a network, compiles, builds or starts processes, on a slow machine with other work."""
REAL_SERVER = 1200
"""The same for one that starts tritonservers, whose own deadlines (`server_process`) should pass first and say more."""

CPP_SKIPS = ("cannot compile here", "this processor has no")
"""What the reasons of skipped tests of C++ begin with."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--green",
        choices=("skip", "run", "keep"),
        help="leave out test files that passed with the same files and versions (skip), also keep for other machines "
        "what passed (keep), or run all (run); see ci/helpers/green_runs.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--green"):
        from green_runs import GreenRuns

        config.pluginmanager.register(GreenRuns(config, HERE.parent))


@cache
def folder_of(path: Path) -> str:
    """`unit/<room>`, or the folder of `ci` that a test file is in."""
    parts = path.resolve().relative_to(HERE).parts[:-1]
    return "/".join(parts[: 2 if parts[0] == "unit" else 1])


def pytest_itemcollected(item: pytest.Item) -> None:
    folder = folder_of(item.path)
    is_slow = item.get_closest_marker("slow") is not None
    if item.get_closest_marker("timeout") is None:
        if folder.startswith("L0_"):
            item.add_marker(pytest.mark.timeout(REAL_SERVER))
        elif is_slow or folder == "kernels":
            item.add_marker(pytest.mark.timeout(SLOW))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first, so that no worker is left alone with one at the end: those that are marked so,
    then those against servers, then those with slow tests."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        return is_short(item), not needs_server(item), item.path not in slow

    items.sort(key=place)


def is_short(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is None


def needs_server(item: pytest.Item) -> bool:
    return folder_of(item.path).startswith("L0_")


SHARED = pytest.StashKey[contextlib.ExitStack]()


@pytest.fixture(scope="session")
def shared_servers(pytestconfig: pytest.Config) -> Iterator[contextlib.ExitStack]:
    """Ends the servers that were entered into it when no test follows that needs one: idle, four of them with all their
    models take a core a tenth of its time."""
    with contextlib.ExitStack() as stack:
        pytestconfig.stash[SHARED] = stack
        yield stack


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    shared = item.config.stash.get(SHARED, None)
    if shared is not None and nextitem is not None and is_short(nextitem) and not needs_server(nextitem):
        shared.close()


@pytest.fixture(scope="session")
def server(shared_servers: contextlib.ExitStack) -> ServerProcess:
    """A tritonserver with the default model and the models of every API, for all tests that leave it as it was."""
    from server_process import server_that_stays

    return shared_servers.enter_context(server_that_stays(apis=["tensorrtllm", "vllm", "unary"]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by folder, for the budgets in CONTRIBUTING.md."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = terminalreporter.config.rootpath / report.nodeid.partition("::")[0]
                seconds[folder_of(path)] += report.duration
    if seconds:
        shown = ", ".join(f"{folder} {seconds[folder]:.0f}" for folder in sorted(seconds))
        terminalreporter.write_line(f"seconds by folder: {shown}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """The last line of a run names the C++ paths that this machine cannot run."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        skipped = [report for report in reporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
        reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
        untried = [f"{reason} ({number} tests)" for reason, number in reasons.items() if reason.startswith(CPP_SKIPS)]
        if untried:
            reporter.write_line(f"C++ that was not run: {'; '.join(untried)}")
    return result
