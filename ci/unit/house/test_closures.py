"""On which files a test depends: too many rather than too few, but not the whole repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from closures import Tree

PACKAGE = "kernels/inflight_kernels"
TEST = "ci/unit/test_it.py"
PAGE = "README.md"

FILES = {
    f"{PACKAGE}/__init__.py": "from inflight_kernels.norm import rms_norm\nfrom inflight_kernels.rope import rope",
    f"{PACKAGE}/norm/__init__.py": "from inflight_kernels.dispatch import implementation\n"
    "def rms_norm(): return implementation(__name__)",
    f"{PACKAGE}/norm/reference.py": "",
    f"{PACKAGE}/rope/__init__.py": "from inflight_kernels.tables import TABLE\ndef rope(): pass",
    f"{PACKAGE}/tables.py": "TABLE = 1",
    f"{PACKAGE}/dispatch.py": "import torch",
    f"{PACKAGE}/cpu/library.py": "",
    f"{PACKAGE}/cpu/native/tiles.h": "",
    f"{PACKAGE}/cpu/{PAGE}": "",
    "backend/inflight/worker.py": "def main():\n    from inflight.loop import Loop",
    "backend/inflight/loop.py": "",
    "backend/inflight/notes.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import inflight.loop",
    "backend/inflight/programs.py": "ALL = ('calls', 'model', Path(__file__).parent.glob('*.py'))",
    "backend/monitoring/alerts.yml": "",
    "backend/model.py": "",
    "client/inflight_client/chat.py": "",
    "model_repository/llm/config.pbtxt": "",
    "ci/conftest.py": "import pytest\n@pytest.fixture\ndef server():\n    from server_process import ServerProcess",
    "ci/helpers/server_process.py": "",
    "ci/helpers/calls.py": "",
    "ci/helpers/fake_rank.py": "",
    "ci/kernels/aot_table.json": "",
    "ci/kernels/norm/aot_cases.py": "",
    "ci/kernels/rope/aot_cases.py": "",
    "ci/kernels/rope/other_cases.py": "",
    "README.md": "",
    "constraints.txt": "",
    "pyproject.toml": "",
}


def tree_of(root: Path, test: str, path: str = TEST, gone: tuple[str, ...] = ()) -> Tree:
    for name, text in {**FILES, path: test}.items():
        if name not in gone:
            root.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            root.joinpath(name).write_text(text)
    return Tree(root, gone)


@pytest.mark.parametrize(
    ("code", "inside", "outside"),
    [
        ("import calls", ["ci/helpers/calls.py", "constraints.txt", "ci/conftest.py"], ["backend/model.py"]),
        ("def test():\n    import calls", ["ci/helpers/calls.py"], []),
        ("from inflight.worker import main", ["backend/inflight/loop.py"], []),
        ("from inflight.notes import x", ["backend/inflight/notes.py"], ["backend/inflight/loop.py"]),
        ("from inflight import worker", ["backend/inflight/loop.py"], []),
        # A name of a package comes with what provides it, and with what that finds by the package's name.
        (
            "from inflight_kernels import rms_norm",
            [f"{PACKAGE}/__init__.py", f"{PACKAGE}/norm/reference.py", f"{PACKAGE}/dispatch.py"],
            [f"{PACKAGE}/rope/__init__.py"],
        ),
        ("import inflight_kernels\ninflight_kernels.rope()", [f"{PACKAGE}/tables.py"], [f"{PACKAGE}/dispatch.py"]),
        ("import inflight_kernels\nprint(inflight_kernels)", [f"{PACKAGE}/tables.py", f"{PACKAGE}/dispatch.py"], []),
        ("import inflight_kernels as k\nk.rope()", [f"{PACKAGE}/tables.py", f"{PACKAGE}/dispatch.py"], []),
        ("from inflight_kernels import *", [f"{PACKAGE}/tables.py", f"{PACKAGE}/dispatch.py"], []),
        # On the way to a module its package counts with its text.
        ("import inflight_kernels.dispatch as d", [f"{PACKAGE}/__init__.py"], [f"{PACKAGE}/rope/__init__.py"]),
        # Programs of other processes.
        ("command = ['-m', 'inflight.worker']", ["backend/inflight/loop.py"], []),
        ("PROGRAM = '''\nfrom inflight_kernels import rope\n'''", [f"{PACKAGE}/tables.py"], [f"{PACKAGE}/dispatch.py"]),
        ("command = [HELPERS / 'fake_rank.py']", ["ci/helpers/fake_rank.py"], []),
        ("command = ['-m', 'fake_rank']", ["ci/helpers/fake_rank.py"], []),
        ("setting = 'fake_rank:attribute'", ["ci/helpers/fake_rank.py"], []),
        ("import_module(f'ci.kernels.{name}.aot_cases')", ["ci/kernels/rope/aot_cases.py"], ["ci/helpers/calls.py"]),
        ("'''Of fake_rank.py and inflight.worker.'''", [], ["ci/helpers/fake_rank.py", "backend/inflight/worker.py"]),
        # Data.
        ("from inflight_kernels.cpu.library import x", [f"{PACKAGE}/cpu/native/tiles.h"], [f"{PACKAGE}/cpu/{PAGE}"]),
        ("TABLE = HERE / 'aot_table.json'", ["ci/kernels/aot_table.json"], []),
        ("ALERTS = ROOT / 'backend' / 'monitoring'", ["backend/monitoring/alerts.yml"], ["backend/model.py"]),
        ("CHECKPOINT = 'model_repository/llm'", ["model_repository/llm/config.pbtxt"], []),
        (
            "CASES = HERE.glob('*/aot_cases.py')",
            ["ci/kernels/norm/aot_cases.py", "ci/kernels/rope/aot_cases.py"],
            ["ci/kernels/rope/other_cases.py"],
        ),
        # What a package finds or names lies in it: no module of the tests, nor all that ends alike.
        (
            "from inflight.programs import x",
            ["backend/inflight/programs.py"],
            ["ci/helpers/calls.py", "backend/model.py"],
        ),
        ("NAMES = ['model']", [], ["backend/model.py"]),
        # Fixtures above it.
        ("def test(server): pass", ["backend/inflight/loop.py", "client/inflight_client/chat.py"], ["README.md"]),
        ("@pytest.mark.usefixtures('server')\ndef test(): pass", ["backend/inflight/loop.py"], []),
        (
            "import pytest\n@pytest.fixture\ndef server(): pass\ndef test(server): pass",
            [],
            ["backend/inflight/loop.py"],
        ),
    ],
)
def test_what_belongs_to_a_closure(tmp_path: Path, code: str, inside: list[str], outside: list[str]) -> None:
    files = tree_of(tmp_path, code).closure(TEST).files
    assert ({*inside, TEST} - files, set(outside) & files) == (set(), set())


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("ci/unit/house/test_it.py", {*FILES}),
        (
            "ci/L0_llm/test_it.py",
            {name for name in FILES if name.startswith(("backend", "kernels", "client", "model"))},
        ),
    ],
)
def test_rules_depend_on_everything_and_server_tests_on_what_a_server_runs(
    tmp_path: Path, path: str, inside: set[str]
) -> None:
    assert inside <= tree_of(tmp_path, "def test_it(): pass", path).closure(path).files


def test_what_imports_a_file_that_is_gone_depends_on_it(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "import calls", gone=("ci/helpers/calls.py",))
    assert "ci/helpers/calls.py" in tree.closure(TEST).files


def test_libraries_are_those_of_all_its_files(tmp_path: Path) -> None:
    closure = tree_of(tmp_path, "import json\nfrom numpy import array\nimport inflight_kernels.dispatch").closure(TEST)
    assert closure.libraries == {"numpy", "torch", "pytest"}


def test_of_this_repository_a_family_of_kernels_depends_on_few_files_and_its_compilation_on_all_kernels() -> None:
    tree = Tree()
    norm = tree.closure("ci/kernels/norm/test_rms_norm.py").files
    assert "kernels/inflight_kernels/norm/gpu/rms_norm.py" in norm and "ci/kernels/kernel_cases.py" in norm
    assert not any("attention" in path or path.startswith("backend") for path in norm)
    compiled = tree.closure("ci/kernels/test_aot.py").files
    kernels = {path for path in tree.files if path.startswith("kernels/") and "/gpu/" in path and path.endswith(".py")}
    assert len(kernels) > 20 and kernels - compiled == set()
    assert "ci/kernels/aot_table.json" in compiled
