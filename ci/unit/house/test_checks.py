"""What every run of the tests does by itself: deadlines, and the last line about C++ that was not run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = "pytester"

CONFTEST = Path(__file__).parents[2] / "conftest.py"

EXAMPLES = """
import pytest

@pytest.mark.skipif(True, reason="this processor has no AMX")
@pytest.mark.parametrize("size", range(3))
def test_tiles(size): pass

@pytest.mark.skipif(True, reason="cannot compile here: no C++ compiler was found; install g++")
def test_compiled(): pass

@pytest.mark.skipif(True, reason="needs sm_89")
def test_gpu(): pass

def test_other(): pass
"""

LIMITS = """
import pytest

def limits(request):
    return [mark.args[0] for mark in request.node.iter_markers("timeout")]

def test_plain(request):
    assert limits(request) == [{plain}]

@pytest.mark.slow
def test_slow(request):
    assert limits(request) == [{slow}]

@pytest.mark.slow
@pytest.mark.timeout(7)
def test_named(request):
    assert limits(request) == [7]
"""

MARKERS = "[pytest]\nmarkers =\n    slow\n    timeout\n"


@pytest.fixture
def checkout(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository with the conftest of `ci` and no test yet."""
    pytester.makeini(MARKERS)
    pytester.path.joinpath("ci").mkdir()
    pytester.path.joinpath("ci", "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"))
    return pytester


def write(checkout: pytest.Pytester, path: str, text: str) -> None:
    file = checkout.path / "ci" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def run(checkout: pytest.Pytester) -> pytest.RunResult:
    without = ("cacheprovider", "asyncio", "langsmith_plugin", "anyio")  # the last two as pyproject.toml does
    return checkout.runpytest("ci", *(word for name in without for word in ("-p", f"no:{name}")))


def test_the_last_line_names_the_cpp_that_was_not_run(checkout: pytest.Pytester) -> None:
    write(checkout, "unit/kernels/test_example.py", EXAMPLES)
    result = run(checkout)
    result.assert_outcomes(passed=1, skipped=5)
    assert result.outlines[-1] == (
        "C++ that was not run: this processor has no AMX (3 tests); "
        "cannot compile here: no C++ compiler was found; install g++ (1 tests)"
    )


def test_where_all_was_run_nothing_is_said(checkout: pytest.Pytester) -> None:
    write(checkout, "unit/server/test_example.py", "def test_it(): pass")
    assert not any("C++" in line for line in run(checkout).outlines)


def test_seconds_are_told_by_folder(checkout: pytest.Pytester) -> None:
    for name in (
        "unit/server/test_a.py",
        "unit/executor/front/test_b.py",
        "L0_llm/test_c.py",
        "kernels/norm/test_d.py",
    ):
        write(checkout, name, "def test_it(): pass")
    run(checkout).stdout.fnmatch_lines("seconds by folder: L0_llm 0, kernels 0, unit/executor 0, unit/server 0")


@pytest.mark.parametrize(
    ("folder", "plain", "slow"), [("unit/server", "", 600), ("kernels/norm", 600, 600), ("L0_llm", 1200, 1200)]
)
def test_deadlines_go_by_folder_and_marker(checkout: pytest.Pytester, folder: str, plain: object, slow: int) -> None:
    write(checkout, f"{folder}/test_example.py", LIMITS.format(plain=plain, slow=slow))
    run(checkout).assert_outcomes(passed=3)
