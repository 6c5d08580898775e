"""The repository's Python files: their names as modules, and what each imports.

Shared by the rules about imports (`ci/unit/house/test_architecture.py`) and by `closures.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"inflight": "backend", "inflight_kernels": "kernels", "inflight_client": "client"}
"""Package -> the folder that it lies in."""
FOLDERS = ("backend", "kernels", "client", "ci")


@dataclass(frozen=True)
class Import:
    origin: str
    """Full name of the module that is imported, or from which something is."""
    name: str
    """What is imported from `origin`; "" where that is the module itself."""
    line: int
    at_import_time: bool
    """False inside a function and under `if TYPE_CHECKING`."""
    for_types: bool = False
    """Under `if TYPE_CHECKING`: never executed."""

    @property
    def module(self) -> str:
        """`from inflight import config` names the module config; names below two levels are of their module."""
        return f"{self.origin}.{self.name}" if self.name and "." not in self.origin else self.origin


def imports_of(
    node: ast.AST, module: str, is_package: bool, at_import_time: bool = True, for_types: bool = False
) -> Iterator[Import]:
    """Every import in `node`, a part of the module `module`; `is_package`: whether that is an `__init__.py`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, "", child.lineno, at_import_time, for_types)
        elif isinstance(child, ast.ImportFrom):
            origin = origin_of(child, module, is_package)
            for alias in child.names:
                yield Import(origin, alias.name, child.lineno, at_import_time, for_types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imports_of(ast.Module(child.body, []), module, is_package, False, True)
            yield from imports_of(ast.Module(child.orelse, []), module, is_package, False, for_types)
        elif not isinstance(child, ast.expr):  # which holds no statement
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports_of(child, module, is_package, at_import_time and not is_function, for_types)


def origin_of(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Full name of the module from which `module` imports here."""
    origin = node.module or ""
    if not node.level:
        return origin
    keep = len(module.split(".")) - node.level + is_package
    return ".".join([*module.split(".")[:keep], *([origin] if origin else [])])


def module_of(path: Path) -> str:
    """Dotted name under which a file, given from the repository's root, is imported; of one that nobody imports, its
    path with dots."""
    parts = path.with_suffix("").parts
    if parts[0] in PACKAGES.values() and parts[1] in PACKAGES:
        parts = parts[1:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return parts[-1] if parts == ("backend", "model") else ".".join(parts)
