"""What a program imports from `inflight` and `inflight_client`: all of it is there, and nothing of it is loaded before
it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import inflight
import inflight_client
from inflight.executor.generation_executor import GenerationExecutor
from inflight_client._client import Client

SOURCES = [str(Path(str(package.__file__)).parents[1]) for package in (inflight, inflight_client)]


@pytest.mark.parametrize("package", [inflight, inflight_client], ids=lambda package: package.__name__)
def test_every_public_name_is_there_and_type_checkers_see_the_same(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        node.module: tuple(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert imported == package._HOMES
    assert sorted(name for names in imported.values() for name in names) == sorted(package.__all__)
    for name in package.__all__:
        found = getattr(package, name)
        # Another name for a type, such as Prompt, has none of its own.
        assert getattr(found, "__name__", name) == name
    assert set(package.__all__) <= set(dir(package))


def test_a_name_is_what_its_module_has() -> None:
    assert inflight.GenerationExecutor is GenerationExecutor
    assert inflight_client.Client is Client


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = inflight.Engine
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = inflight_client.Engine


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import inflight", "msgspec zmq tokenizers torch numpy rich transformers"),
        ("from inflight import Request, SamplingConfig", "zmq tokenizers torch rich transformers"),
        ("from inflight import Executor", "tokenizers torch rich transformers mpi4py"),
        ("from inflight import GenerationExecutor, EngineConfig", "torch rich transformers mpi4py"),
        # While ranks of the server's own load, the rest of it is imported.
        ("from inflight.http.engine_front import open_front", "httptools starlette jinja2 tokenizers torch"),
        ("import inflight_client.cli", "inflight msgspec numpy grpc tritonclient torch rich transformers"),
        ("from inflight_client import UsageError", "inflight numpy grpc tritonclient"),
    ],
)
def test_a_name_loads_only_what_it_needs(statement: str, heavy: str) -> None:
    program = (
        f"import sys; sys.path[:0] = {SOURCES!r}\n{statement}\n"
        f"print(*[name for name in {heavy.split()!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
