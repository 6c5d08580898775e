"""`make mutants` plants faults that change what a program means, and tells which of them a test catches."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

from ci.mutants import __main__ as mutants
from ci.mutants import trials
from ci.mutants.faults import Module
from ci.mutants.judge import Finding, found_again
from ci.mutants.record import kept_faults, show

ROOT = Path(__file__).resolve().parents[3]

OPERATORS = [
    ("x = a < b", "comparison", "x = (a <= b)"),
    ("x = a == b", "comparison", "x = (a != b)"),
    ("x = a is not None", "comparison", "x = (a is None)"),
    ("x = a in b", "comparison", "x = (a not in b)"),
    ("x = a and b", "and/or", "x = (a or b)"),
    ("x = a + b", "arithmetic", "x = (a - b)"),
    ("x = a // b", "arithmetic", "x = (a * b)"),
    ("x = 'é' < b", "comparison", "x = ('é' <= b)"),
    ("x += b", "assignment", "x -= b"),
    ("x = a[7]", "off by one", "x = a[8]"),
    ("x = f(a, last=True)", "truth", "x = f(a, last=False)"),
    ("x = not a", "not dropped", "x = (a)"),
    ("x = -a", "sign dropped", "x = (a)"),
    ("x = max(a, b)", "min/max", "x = (min(a, b))"),
    ("x = a.minimum(b)", "min/max", "x = (a.maximum(b))"),
    ("if a: f()", "condition negated", "if (not a): f()"),
    ("if not a: f()", "condition negated", "if (a): f()"),
    ("x = [a for a in b if a]", "condition negated", "x = [a for a in b if (not a)]"),
    ("self.f(a)", "call dropped", "pass"),
    ("await f(a)", "call dropped", "pass"),
    ("return f(a)", "return", "return None"),
]

UNTOUCHED = [
    "x: Literal[1] = a",
    "def g(a: Literal[2] = b) -> Literal[3]: ...",
    "assert a < 1",
    "raise ValueError(f'{a + 1} is not {max(a, 2)}')",
    "self._logger.warning('%d', a + 1)",
    "x = isinstance(a, int | None)",
    "tl.assume(a < 1)",
    "'a docstring'",
    "x = f'{a + 1}'",
]


def in_function(statement: str) -> str:
    return f"async def f(self, a, b, x):\n    {statement}\n"


@pytest.mark.parametrize(("statement", "operator", "planted"), OPERATORS)
def test_an_operator_makes_another_program(statement: str, operator: str, planted: str) -> None:
    module = Module("toy.py", in_function(statement))
    (key,) = (key for key in module.places if key[3] == operator)
    assert module.planted(key) == in_function(planted)
    assert ast.dump(ast.parse(module.planted(key))) != ast.dump(ast.parse(in_function(statement)))


@pytest.mark.parametrize("statement", UNTOUCHED)
def test_what_no_test_should_notice_is_left_alone(statement: str) -> None:
    assert Module("toy.py", in_function(statement)).places == {}


@pytest.mark.parametrize("source", ["LIMIT = 1 << 20", "if TYPE_CHECKING:\n    x = 1", "@f(1)\nclass A(B, n=2): ..."])
def test_constants_and_what_types_need_are_left_alone(source: str) -> None:
    assert Module("toy.py", source).places == {}


def test_a_fault_is_found_again_where_other_lines_have_changed() -> None:
    before = Module("toy.py", "def f(a):\n    if a > 1:\n        return a\n    return [a > 1, a > 1]\n")
    after = Module("toy.py", "import b\n\n\ndef g(): return 1 > 2\n\n\ndef f(a):\n    return [a > 1, a > 1]\n")
    key = ("toy.py", "f", "return [a > 1, a > 1]", "comparison", 1)
    assert before.fault(key).line == 4 and after.fault(key).line == 8
    assert before.fault(key).name == after.fault(key).name
    assert "[a > 1, (a >= 1)]" in after.planted(key)
    assert ("toy.py", "f", "if a > 1:", "comparison", 0) in before.places.keys() - after.places.keys()


TOY = """
def clamp(value, top):
    if value > top:
        return top
    return value
"""
TESTS = """
from inflight.toy import clamp

def test_higher(): assert clamp(3, 2) == 2
def test_lower(): assert clamp(1, 2) == 1
"""


@pytest.mark.slow
def test_faults_are_caught_and_those_without_effect_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`>=` does what `>` does here."""
    root, kept = tmp_path / "toy", tmp_path / "kept.json"
    for path, text in {"backend/inflight/toy.py": TOY, "ci/unit/test_toy.py": TESTS}.items():
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)
    (root / "backend/inflight/__init__.py").touch()
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    monkeypatch.setattr(trials, "PRELOADED", ())
    monkeypatch.setattr(mutants, "BUILD", tmp_path / "build")

    assert mutants.main(["--root", str(root), "--faults", "9", "--processes", "1", "--write", str(kept)]) == 0
    found = {(row["line"], row["operator"]): row for row in json.loads(kept.read_text())["faults"]}
    caught_by = {key: row["by"].partition("::")[2] for key, row in found.items()}
    assert caught_by.pop((3, "condition negated")) in ("test_higher", "test_lower")
    assert caught_by == {(3, "comparison"): "", (4, "return"): "test_higher", (5, "return"): "test_lower"}
    assert found[3, "comparison"]["result"] == "survived" and found[3, "comparison"]["tests"] == 2
    assert "survived: " in capfd.readouterr().out

    (root / "backend/inflight/toy.py").write_text("clamp = min")
    assert mutants.main(["--root", str(root), "--faults", str(kept), "--only", "caught"]) == 0
    assert "its place is no longer there" in capfd.readouterr().out


def test_what_is_no_longer_caught_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    module = Module("toy.py", TOY)
    first, second, third, *_ = [module.fault(key) for key in module.places]
    before = {first.name: Finding("caught", "a"), second.name: Finding("caught", "b"), third.name: Finding("survived")}
    after = {first.name: Finding("survived"), second.name: Finding("gone"), third.name: Finding("caught", "c")}
    show([first, second, third], after, before)
    said = capfd.readouterr().out
    assert said.count("no longer caught: ") == 1 and f"no longer caught: {first.name} {first}" in said
    assert "1 are no longer caught that were before, 1 are caught now that were not" in said


def test_a_recorded_test_is_asked_where_it_has_moved(tmp_path: Path) -> None:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "test_a.py").write_text("def test_one(): ...")
    (tmp_path / "ci" / "test_b.py").write_text("class TestX:\n    def test_two(self): ...")
    assert found_again("ci/test_a.py::test_one[1]", tmp_path) == "ci/test_a.py::test_one[1]"
    assert found_again("ci/test_a.py::TestX::test_two[1]", tmp_path) == "ci/test_b.py::TestX::test_two[1]"
    assert found_again("ci/unit/test_c.py::test_three", tmp_path) == "ci/unit/test_c.py::test_three"


def test_kept_faults_are_of_sources_that_are_there() -> None:
    """Whoever moves a source takes its faults along; whoever deletes one deletes them."""
    faults = kept_faults(ROOT / "ci" / "mutants" / "sample.json", None)
    assert len(faults) > 100 and [fault.path for fault in faults if not (ROOT / fault.path).is_file()] == []
