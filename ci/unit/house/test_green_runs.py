"""What passed is left out while its files and versions stay, and runs again as soon as any of them changes."""

from __future__ import annotations

import json
from pathlib import Path

import green_runs
import pytest

pytest_plugins = "pytester"

CONFTEST = Path(__file__).parents[2] / "conftest.py"
WITHOUT = tuple(
    word for name in ("cacheprovider", "asyncio", "langsmith_plugin", "anyio") for word in ("-p", f"no:{name}")
)
"""Plugins that no run needs."""
TEST = "ci/kernels/norm/test_norm.py"
FILES = {
    "ci/conftest.py": CONFTEST.read_text(encoding="utf-8"),
    "ci/kernels/kernel_cases.py": "TOLERANCE = 1e-6",
    "ci/kernels/rope/test_rope.py": "def test_rope(): pass",
    "ci/unit/server/test_server.py": "def test_server(): pass",
    "kernels/inflight_kernels/norm/gpu.py": "SCALE = 1",
    "kernels/inflight_kernels/norm/native/norm.cpp": "",
    "constraints.txt": "torch==2.13.0",
    TEST: """
import pytest

# Named and not imported: the packages of this process are others.
CASES, KERNEL = "kernel_cases.py", "inflight_kernels.norm.gpu"

@pytest.mark.parametrize("size", range(3))
def test_norm(size): pass

@pytest.mark.slow
def test_long(): pass
""",
}


@pytest.fixture
def checkout(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A repository with tests of two families of kernels and of a room, and an empty cache."""
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    long\n    timeout\n")
    for name in FILES:
        write(pytester, name, FILES[name])
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(pytester.path / "cache"))
    return pytester


def write(checkout: pytest.Pytester, name: str, text: str) -> None:
    path = checkout.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def run(checkout: pytest.Pytester, *options: str, mode: str = "skip", where: str = "ci") -> list[str]:
    """Tests that ran and passed."""
    result = checkout.runpytest_inprocess(where, "-v", "--green", mode, *WITHOUT, *options)
    assert result.ret == 0, result.outlines
    return [line.partition(" PASSED")[0] for line in result.outlines if " PASSED" in line]


def test_files_that_passed_are_left_out_and_the_last_lines_say_so(checkout: pytest.Pytester) -> None:
    assert len(run(checkout)) == 6
    assert run(checkout) == ["ci/unit/server/test_server.py::test_server"]
    result = checkout.runpytest_inprocess("ci/kernels", "--green", "skip", *WITHOUT)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "not run: ci/kernels/norm/: passed with the same files and versions on 20*",
            "not run: ci/kernels/rope/: passed with the same files and versions on 20*",
            "make test-full runs them all",
        ]
    )


@pytest.mark.parametrize(
    ("name", "runs_again"),
    [
        (TEST, True),
        ("ci/conftest.py", True),
        ("ci/kernels/kernel_cases.py", True),
        ("kernels/inflight_kernels/norm/gpu.py", True),
        ("kernels/inflight_kernels/norm/native/norm.cpp", True),
        ("constraints.txt", True),
        ("ci/kernels/rope/test_rope.py", False),
        ("ci/unit/server/test_server.py", False),
    ],
)
def test_a_file_runs_again_when_any_it_depends_on_changed(
    checkout: pytest.Pytester, name: str, runs_again: bool
) -> None:
    run(checkout)
    write(checkout, name, f"{FILES[name]}\n#" if name.endswith(".py") else "torch==2.14.0")
    assert (f"{TEST}::test_long" in run(checkout)) == runs_again
    assert f"{TEST}::test_long" not in run(checkout)


@pytest.mark.parametrize("name", ["version", "processor", "compiler", "instruction_sets"])
def test_a_file_runs_again_with_other_versions(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run(checkout)
    monkeypatch.setattr(green_runs, name, lambda *_: "another")
    assert f"{TEST}::test_long" in run(checkout)


def test_another_file_beside_its_data_makes_it_run_again(checkout: pytest.Pytester) -> None:
    run(checkout)
    write(checkout, "kernels/inflight_kernels/norm/native/new.h", "")
    assert f"{TEST}::test_long" in run(checkout)


@pytest.mark.parametrize(
    "options", [["-k", "norm"], [f"--deselect={TEST}::test_long"], ["--ignore=ci/unit", "-k", "test"]]
)
def test_where_tests_are_chosen_nothing_is_noted_and_nothing_left_out(
    checkout: pytest.Pytester, options: list[str]
) -> None:
    first = run(checkout, *options)
    assert f"{TEST}::test_norm[0]" in first
    assert len(run(checkout)) == 6
    assert run(checkout, *options) == first


def test_what_is_named_runs(checkout: pytest.Pytester) -> None:
    run(checkout)
    assert len(run(checkout, where=TEST)) == 4
    assert len(run(checkout, where=f"{TEST}::test_long")) == 1


def test_markers_have_their_own_notes(checkout: pytest.Pytester) -> None:
    """`make unit` runs the slow tests apart."""
    assert f"{TEST}::test_norm[0]" in run(checkout, "-m", "not slow")
    assert run(checkout, "-m", "slow") == [f"{TEST}::test_long"]
    assert run(checkout, "-m", "slow") == []
    assert run(checkout, "-m", "not slow") == ["ci/unit/server/test_server.py::test_server"]


@pytest.mark.parametrize(
    "text",
    [
        "def test_a(): pass\ndef test_b(): assert False",
        "import pytest\n@pytest.fixture\ndef x():\n    yield\n    1 / 0\ndef test_a(x): pass",
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('interrupted')",
        "from pathlib import Path\ndef test_a(): Path(__file__).write_text('def test_a(): assert False')",
    ],
    ids=["a failure", "a failure after it", "interrupted", "changed meanwhile"],
)
def test_a_file_of_which_not_all_passed_runs_again(checkout: pytest.Pytester, text: str) -> None:
    write(checkout, "ci/kernels/rope/test_rope.py", text)
    options = ("ci/kernels/rope", "--green", "skip", *WITHOUT)
    checkout.runpytest_inprocess(*options)
    result = checkout.runpytest_inprocess(*options)
    assert "not run" not in result.stdout.str()
    assert result.ret != 0


@pytest.mark.parametrize(
    ("reason", "runs_again"), [("cannot compile here: there is no g++", True), ("this processor has no AMX", False)]
)
def test_a_file_that_lacks_a_tool_runs_again_where_one_that_lacks_an_instruction_does_not(
    checkout: pytest.Pytester, reason: str, runs_again: bool
) -> None:
    text = f"import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip({reason!r})"
    write(checkout, "ci/kernels/rope/test_rope.py", text)
    run(checkout)
    assert ("ci/kernels/rope/test_rope.py::test_a" in run(checkout)) == runs_again


def test_with_run_nothing_is_left_out(checkout: pytest.Pytester) -> None:
    run(checkout)
    assert len(run(checkout, mode="run")) == 6


def test_the_committed_file_stands_for_a_cache_where_the_same_versions_are(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(checkout, mode="keep")
    kept = json.loads((checkout.path / green_runs.KEPT).read_text())
    assert set(kept["digests"]) == {TEST, "ci/kernels/rope/test_rope.py"}
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(checkout.path / "empty"))
    assert run(checkout) == ["ci/unit/server/test_server.py::test_server"]
    monkeypatch.setattr(green_runs, "processor", lambda: "another")
    assert len(run(checkout)) == 6
    run(checkout, mode="keep")
    both = json.loads((checkout.path / green_runs.KEPT).read_text())["digests"][TEST]
    assert len(both) == 2 and kept["digests"][TEST].items() <= both.items()


def test_what_passed_before_is_kept_without_running_again(checkout: pytest.Pytester) -> None:
    run(checkout)
    assert run(checkout, mode="keep", where="ci/kernels/rope") == []
    assert run(checkout, mode="keep", where="ci/kernels/norm") == []
    assert set(json.loads((checkout.path / green_runs.KEPT).read_text())["digests"]) == {
        TEST,
        "ci/kernels/rope/test_rope.py",
    }


@pytest.mark.parametrize(
    ("kept", "here", "stands"),
    [
        ("amx avx512 avx2", "amx avx512 avx2", True),
        ("avx512_bf16 avx512 avx2", "avx512 avx2", True),
        ("avx512 avx2", "avx512_bf16 avx512 avx2", False),
        # Sums of bfloat16 have another order there.
        ("amx avx512 avx2", "avx512 avx2", False),
        ("neon_dotprod neon", "neon", True),
    ],
)
def test_a_machine_relies_on_one_with_more_instructions_where_sums_have_the_same_order(
    checkout: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kept: str, here: str, stands: bool
) -> None:
    monkeypatch.setattr(green_runs, "instruction_sets", lambda: kept)
    run(checkout, mode="keep")
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(checkout.path / "empty"))
    monkeypatch.setattr(green_runs, "instruction_sets", lambda: here)
    left = run(checkout)
    assert (f"{TEST}::test_long" not in left) == stands
    assert "ci/kernels/rope/test_rope.py::test_rope" not in left, "C++ has no part in it"


def test_what_no_longer_passes_is_no_longer_kept(checkout: pytest.Pytester) -> None:
    run(checkout, mode="keep")
    write(checkout, "ci/kernels/rope/test_rope.py", "def test_rope(): assert False")
    checkout.runpytest_inprocess("ci/kernels", "--green", "keep", *WITHOUT)
    assert set(json.loads((checkout.path / green_runs.KEPT).read_text())["digests"]) == {TEST}


@pytest.mark.slow
def test_workers_leave_out_the_same_files_and_their_results_are_put_together(checkout: pytest.Pytester) -> None:
    write(checkout, "ci/unit/server/test_server.py", "")
    options = ("-n", "2", "--dist", "worksteal", *WITHOUT)
    for expected in (5, 0):
        result = checkout.runpytest_inprocess("ci", "--green", "skip", *options)
        result.assert_outcomes(passed=expected)
        assert result.ret == 0
