"""What a program imports from `inflight`: all of it is there, and nothing of it is loaded before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import inflight
from inflight.executor.generation_executor import GenerationExecutor

BACKEND = Path(inflight.__file__).parents[1]


def test_every_public_name_is_there_and_type_checkers_see_the_same() -> None:
    tree = ast.parse(Path(inflight.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        node.module: tuple(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert imported == inflight._HOMES
    assert sorted(name for names in imported.values() for name in names) == sorted(inflight.__all__)
    assert all(getattr(inflight, name).__name__ == name for name in inflight.__all__)
    assert inflight.GenerationExecutor is GenerationExecutor
    assert set(inflight.__all__) <= set(dir(inflight))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = inflight.Engine


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import inflight", "msgspec zmq tokenizers torch numpy rich transformers"),
        ("from inflight import Request, SamplingConfig", "zmq tokenizers torch rich transformers"),
        ("from inflight import Executor", "tokenizers torch rich transformers mpi4py"),
        ("from inflight import GenerationExecutor, EngineConfig", "torch rich transformers mpi4py"),
    ],
)
def test_a_name_loads_only_what_it_needs(statement: str, heavy: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(BACKEND)!r})\n{statement}\n"
        f"print(*[name for name in {heavy.split()!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
