"""On which files of the repository a test file depends, read from the code and not from a run.

A file's closure is what it imports, at its top and inside functions, and what that imports, and so on, with:

- the `conftest.py` files above a test, and of their fixtures those that it names;
- modules that a string names: a program for another process, the name after `-m` or of what is patched, one for
  `import_module`, also where only a part of it is known;
- files that a string names: data, folders of data, patterns of `glob`;
- data beside a module of a package, such as its C++ sources;
- for a test that starts a server, all that a server runs; for the house's rules, everything.

Where in doubt a file belongs to the closure: it is too large rather than too small. Two things keep it from being the
whole repository. `from package import name` asks for the module in which the package found the name, not for all that
the package has. And a package on the way to a module counts with its own text, not with what it imports for others:
those have tests of their own.

Knows no test and no git.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeGuard

from sources import PACKAGES, ROOT, imports_of, module_of, origin_of

TOPS = ("backend", "kernels", "client", "ci", "model_repository", "docs", "scripts", ".ci")
"""Folders whose files count, and those beside them that are not hidden."""
FOR_ALL = ("constraints.txt", "pyproject.toml")
"""On which every test depends: versions, and how tests are run."""
SERVED = ("backend/", "kernels/", "client/", "model_repository/")
"""All that a server runs."""
STARTS_SERVERS = "ci/helpers/server_process.py"
CHOOSES_TESTS = "ci/helpers/green_runs.py"
"""Imported by `ci/conftest.py`. It decides whether a test runs, and not what it finds: its text alone counts."""
SERVER_TESTS = "ci/L0_"
HOUSE = "ci/unit/house/"
BARE = ("ci/helpers", "ci/L0_supervisor", "ci/default_model", "backend")
"""Folders whose modules are imported by their bare names."""
EVERYWHERE = frozenset({"__init__.py", "conftest.py"})
"""Names of files that name none."""
OURS = (*PACKAGES, "ci")
DOTTED = re.compile(rf"\b(?:{'|'.join(OURS)})(?:\.\w+)+")


class Part(NamedTuple):
    """What of a file is needed: what provides one name in a package's `__init__.py`, all of it, or only its text."""

    path: str
    name: str


ALL, TEXT = "*", ""


@dataclass
class Needs:
    """What a piece of code needs directly."""

    parts: set[Part] = field(default_factory=set)
    libraries: set[str] = field(default_factory=set)
    """First names of modules that are not of the repository."""

    def add(self, other: Needs) -> None:
        self.parts |= other.parts
        self.libraries |= other.libraries


class Closure(NamedTuple):
    files: frozenset[str]
    libraries: frozenset[str]


class Tree:
    """The files of a repository, each read once."""

    def __init__(self, root: Path = ROOT, gone: Iterable[str] = ()) -> None:
        """`gone`: files that are no longer there, and count as empty ones, so that who imports them depends on them."""
        self._root = root
        self._gone = frozenset(gone)
        self.files = frozenset(self._list()) | self._gone
        self._needs: dict[Part, Needs] = {}
        self._trees: dict[str, ast.Module] = {}
        self._fixtures: dict[str, frozenset[str]] = {}

    def _list(self) -> Iterator[str]:
        yield from (path.name for path in self._root.iterdir() if path.is_file() and path.name[0] != ".")
        for top in TOPS:
            for path in sorted((self._root / top).rglob("*")):
                relative = path.relative_to(self._root)
                if path.is_file() and not any(part.startswith(("__pycache__", ".")) for part in relative.parts[1:]):
                    yield relative.as_posix()

    @cached_property
    def _modules(self) -> dict[str, str]:
        """Module -> its file, by full name and by bare name."""
        found = {}
        for path in sorted(self.files):
            if path.endswith(".py"):
                found[module_of(Path(path)).removesuffix(".__init__")] = path
                for folder in BARE:
                    if path.startswith(f"{folder}/") and not path.startswith(tuple(f"backend/{p}" for p in PACKAGES)):
                        bare = path.removeprefix(f"{folder}/").removesuffix(".py").removesuffix("/__init__")
                        found.setdefault(bare.replace("/", "."), path)
        return found

    @cached_property
    def _named(self) -> dict[str, set[str]]:
        """Last part of a path -> the files that have it."""
        found: dict[str, set[str]] = {}
        for path in self.files:
            found.setdefault(path.rpartition("/")[2], set()).add(path)
        return {name: paths for name, paths in found.items() if name not in EVERYWHERE}

    @cached_property
    def _data_folders(self) -> dict[str, set[str]]:
        """Name of a folder without any Python file, though there are some beside it -> its files, however deep."""
        found: dict[str, set[str]] = {}
        for path in self.files:
            parents = [parent for parent in PurePosixPath(path).parents if str(parent) not in self._with_code]
            if parents:
                found.setdefault(parents[-1].name, set()).add(path)
        return found

    def tests(self) -> list[str]:
        return sorted(path for path in self.files if re.fullmatch(r"ci/(unit|kernels|L0_\w+)/(.+/)?test_\w+\.py", path))

    def closure(self, test: str) -> Closure:
        """Of a test file."""
        needs = Needs({Part(test, ALL)})
        for conftest in self._conftests(test):
            needs.add(self._conftest_needs(conftest, test))
        reached = self._reached(needs)
        files = {part.path for part in reached.parts} | {name for name in FOR_ALL if name in self.files}
        if test.startswith(HOUSE):
            files = set(self.files)
        elif test.startswith(SERVER_TESTS) or STARTS_SERVERS in files:
            folder = test.rpartition("/")[0]
            files |= {path for path in self.files if path.startswith((*SERVED, f"{folder}/"))}
        return Closure(frozenset(files), frozenset(reached.libraries))

    def _reached(self, start: Needs) -> Needs:
        reached, waiting = Needs(libraries=set(start.libraries)), list(start.parts)
        while waiting:
            part = waiting.pop()
            if part not in reached.parts:
                reached.parts.add(part)
                if part not in self._needs:
                    self._needs[part] = self._needs_of(part)
                reached.libraries |= self._needs[part].libraries
                waiting += self._needs[part].parts
        return reached

    def _needs_of(self, part: Part) -> Needs:
        if part.name == TEXT or not part.path.endswith(".py") or part.path == CHOOSES_TESTS:
            return Needs()
        if part.name == ALL:
            needs = self._code_needs(part.path, self._tree(part.path))
            needs.add(Needs({Part(path, TEXT) for path in self._beside(part.path)}))
        else:
            needs = self._provider(part)
        needs.parts |= {Part(path, TEXT) for path in self._packages_above(part.path)}
        return needs

    def _tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            text = "" if path in self._gone else (self._root / path).read_text(encoding="utf-8")
            self._trees[path] = ast.parse(text)
        return self._trees[path]

    def _packages_above(self, path: str) -> Iterator[str]:
        for parent in PurePosixPath(path).parents:
            if (init := f"{parent}/__init__.py") in self.files and init != path:
                yield init

    @cached_property
    def _data(self) -> dict[str, list[str]]:
        """Folder -> its data: what lies in it, or in a folder without modules of its own there. Pages are none."""
        found: dict[str, list[str]] = {}
        for path in self.files:
            if not path.endswith((".py", ".md")):
                # With what is in the highest folder that has no modules, else the folder itself.
                plain = [parent for parent in PurePosixPath(path).parents if str(parent) not in self._with_code]
                above = (plain[-1] if plain else PurePosixPath(path)).parent
                found.setdefault(str(above), []).append(path)
        return found

    @cached_property
    def _with_code(self) -> set[str]:
        """Folders with a Python file, however deep."""
        return {str(parent) for path in self.files if path.endswith(".py") for parent in PurePosixPath(path).parents}

    def _beside(self, path: str) -> list[str]:
        """Of a module of a package: tests name the data that they read."""
        return self._data.get(path.rpartition("/")[0], []) if is_packaged(path) else []

    def _provider(self, part: Part) -> Needs:
        """What provides a name that somebody takes from a package."""
        module, tree = module_of(Path(part.path)).removesuffix(".__init__"), self._tree(part.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if part.name == (alias.asname or alias.name):
                        return self._imported(origin_of(node, module, is_package=True), alias.name, part.path)
        for node in tree.body:
            if isinstance(node, ast.Assign) and part.name in [ast.unparse(target) for target in node.targets]:
                return self._code_needs(part.path, ast.Module([node], []))
        is_implicit = part.name.startswith("__")
        return Needs() if is_implicit else Needs({Part(part.path, ALL)})

    def _imported(self, origin: str, name: str, importer: str) -> Needs:
        if name and (submodule := self._find(f"{origin}.{name}", importer)):
            above = self._find(origin, importer)
            return Needs({Part(submodule, ALL), *([Part(above, TEXT)] if above else [])})
        path = self._find(origin, importer)
        if path is None:
            head = origin.partition(".")[0]
            return Needs() if head in (*OURS, *sys.stdlib_module_names) else Needs(libraries={head})
        takes_name = name not in ("", "*") and path.endswith("/__init__.py")
        return Needs({Part(path, name if takes_name else ALL)})

    def _find(self, module: str, importer: str) -> str | None:
        """File of a module; one beside the importer comes before others of its bare name."""
        folder = importer.rpartition("/")[0]
        beside = f"{folder}/{module.replace('.', '/')}"
        for path in (f"{beside}.py", f"{beside}/__init__.py"):
            if folder and path in self.files:
                return path
        return self._modules.get(module)

    def _code_needs(self, path: str, code: ast.Module) -> Needs:
        """Of a whole file, or of a part of it."""
        needs = Needs()
        module, is_package = module_of(Path(path)).removesuffix(".__init__"), path.endswith("/__init__.py")
        for each in imports_of(code, module, is_package):
            if not each.for_types:
                for name in [each.name] if each.name else self._taken(code, each.origin):
                    needs.add(self._imported(each.origin, name, path))
        nodes = list(ast.walk(code))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                needs.add(self._string_needs(node.value, path))
            elif isinstance(node, ast.JoinedStr):
                needs.parts |= self._modules_like(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                if node.func.attr in ("glob", "rglob"):
                    # A package looks for what lies with its own modules, or for what is no file of the repository.
                    folder = f"{path.rpartition('/')[0]}/" if is_packaged(path) else ""
                    needs.parts |= {each for each in self._files_like(node.args[0]) if each.path.startswith(folder)}
            elif is_package and isinstance(node, ast.Name) and node.id == "__name__":
                # Whoever gets it may import what is in the package.
                folder = path.removesuffix("__init__.py")
                below = {each for each in self.files if each.startswith(folder) and each.endswith(".py")}
                needs.parts |= {Part(each, ALL) for each in below}
        return needs

    def _taken(self, code: ast.Module, module: str) -> Iterable[str]:
        """Attributes of a module that was imported by its one-part name; [""] if it is used in any other way."""
        if "." in module or not (self._modules.get(module) or "").endswith("/__init__.py"):
            return [""]
        uses = [node for node in ast.walk(code) if isinstance(node, ast.Name) and node.id == module]
        taken = {
            id(node.value): node.attr
            for node in ast.walk(code)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        is_renamed = any(
            alias.name == module and alias.asname
            for node in ast.walk(code)
            if isinstance(node, ast.Import)
            for alias in node.names
        )
        return [""] if is_renamed or any(id(use) not in taken for use in uses) else {taken[id(use)] for use in uses}

    def _string_needs(self, text: str, path: str) -> Needs:
        needs = Needs()
        if "import " in text:
            with suppress(SyntaxError):
                needs.add(self._code_needs(path, ast.parse(textwrap.dedent(text))))
        for name in DOTTED.findall(text):
            while name and name not in self._modules:
                name = name.rpartition(".")[0]
            if name and name not in OURS:
                needs.parts.add(Part(self._modules[name], ALL))
        if text and not re.search(r"\s", text):
            pieces = text.split("/")
            found = self._named.get(pieces[-1], set()) if "." in pieces[-1] else set()
            needs.parts |= {Part(each, ALL) for each in found if each.endswith(text)} or {Part(e, ALL) for e in found}
            # A word such as "native" means more than one thing in a package, whose data are beside its modules.
            for piece in () if is_packaged(path) else pieces:
                needs.parts |= {Part(each, TEXT) for each in self._data_folders.get(piece, ())}
            # Tests name programs so. What a package names so is no module of the tests', nor any word one of backend/.
            bare = None if is_packaged(path) else self._modules.get(text.partition(":")[0])
            if bare is not None and bare.startswith("ci/") and not bare.endswith("/__init__.py"):
                needs.parts.add(Part(bare, ALL))
        return needs

    def _modules_like(self, name: ast.JoinedStr) -> set[Part]:
        pattern = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values)
        if not pattern.startswith(tuple(f"{ours}." for ours in OURS)):
            return set()
        return {Part(path, ALL) for module, path in self._modules.items() if fnmatchcase(module, pattern)}

    def _files_like(self, pattern: ast.expr) -> set[Part]:
        if not isinstance(pattern, ast.Constant) or not isinstance(pattern.value, str):
            return set()
        if not re.search(r"\w", pattern.value.rpartition("/")[2]):
            return set()
        return {Part(path, ALL) for path in self.files if PurePosixPath(path).match(pattern.value)}

    def _conftests(self, test: str) -> list[str]:
        above = [f"{parent}/conftest.py" for parent in PurePosixPath(test).parents]
        return [path for path in above if path in self.files]

    def _fixture_names(self, path: str) -> frozenset[str]:
        if path not in self._fixtures:
            self._fixtures[path] = frozenset(fixture_names(self._tree(path)))
        return self._fixtures[path]

    def _conftest_needs(self, path: str, test: str) -> Needs:
        """All but those fixtures that neither the test names nor another conftest above it, or that one nearer to the
        test replaces."""
        conftests = self._conftests(test)
        wanted = {name for each in (test, *conftests) for name in self._fixture_names(each)}
        nearer = [test, *conftests[: conftests.index(path)]]
        wanted -= {node.name for each in nearer for node in self._tree(each).body if is_fixture(node)}
        body = [node for node in self._tree(path).body if not is_fixture(node) or node.name in wanted]
        needs = self._code_needs(path, ast.Module(body, []))
        needs.parts.add(Part(path, TEXT))
        return needs


def is_packaged(path: str) -> bool:
    return path.startswith(tuple(f"{folder}/{package}/" for package, folder in PACKAGES.items()))


def is_fixture(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Whether it is a fixture that only those get who name it."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return any("fixture" in each and "autouse" not in each and "name=" not in each for each in decorators)


def fixture_names(code: ast.Module) -> Iterator[str]:
    """Parameters of its functions, and what it asks for by a string."""
    for node in ast.walk(code):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("usefixtures", "getfixturevalue")):
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))
