"""The small faults that can be planted in a Python source, one at a time: found by its tree, planted in its text.

Knows no test. Left out is what no test should notice: annotations, decorators, messages of exceptions and logs,
assertions (they state what cannot happen), hints to triton's compiler, and the exact values of named constants.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

SOURCES = ("backend/inflight", "kernels/inflight_kernels", "client/inflight_client")

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
OPPOSITES = {"min": "max", "any": "all", "minimum": "maximum", "argmin": "argmax", "amin": "amax"}
OPPOSITES |= {second: first for first, second in OPPOSITES.items()}
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
COMPILER_HINTS = {"assume", "static_assert", "static_print", "device_assert", "device_print", "debug_barrier"}
NEGATED_ALREADY = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
LONGEST = 160
"""Characters of a description."""


@dataclass(frozen=True)
class Fault:
    """What is found again in a changed tree: the `ordinal`-th place for `operator` on lines of this `text`."""

    path: str
    """Below the root of the repository."""
    scope: str
    """The class and function, with dots; empty for the module."""
    text: str
    """The line, without its indentation."""
    operator: str
    ordinal: int
    line: int
    """Where it was when it was drawn, from 1."""
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.path, self.scope, self.text, self.operator, self.ordinal

    @property
    def name(self) -> str:
        return hashlib.sha256(repr(self.key).encode()).hexdigest()[:10]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} [{self.operator}] {self.before} → {self.after}"

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @staticmethod
    def from_json(found: dict[str, Any]) -> Fault:
        return Fault(**{name: found[name] for name in Fault.__dataclass_fields__})


@dataclass(frozen=True)
class Place:
    """Where a fault can be planted: `node` becomes what `change` makes of a copy of it, or the given text."""

    scope: str
    operator: str
    node: ast.expr | ast.stmt
    statement: ast.stmt
    in_function: bool
    change: Callable[[Any], ast.AST] | str

    def rendered(self) -> tuple[str, str]:
        """The source of the node before and after."""
        if isinstance(self.change, str):
            return ast.unparse(self.node), self.change
        return ast.unparse(self.node), ast.unparse(self.change(copy.deepcopy(self.node)))

    @property
    def lines(self) -> range:
        """Of the statement, or of its head if it has a body."""
        body = getattr(self.statement, "body", None) or getattr(self.statement, "cases", None)
        end = self.statement.end_lineno or self.statement.lineno
        if body:
            end = max(self.statement.lineno, getattr(body[0], "lineno", end) - 1)
        return range(self.statement.lineno, end + 1)


class Module:
    """A source with its places, by the key of their fault."""

    def __init__(self, path: str, source: str) -> None:
        """`path`: what its faults say."""
        self.path = path
        self._source = source
        lines = source.splitlines()
        seen: Counter[tuple[str, str, str]] = Counter()
        self.places: dict[tuple[str, str, str, str, int], Place] = {}
        for place in _places(ast.parse(source)):
            text = lines[place.node.lineno - 1].strip()
            kind = (place.scope, text, place.operator)
            key = (path, *kind, seen[kind])
            self.places[key] = place
            seen[kind] += 1

    @staticmethod
    def read(root: Path, path: str) -> Module:
        return Module(path, (root / path).read_text(encoding="utf-8"))

    def fault(self, key: tuple[str, str, str, str, int]) -> Fault:
        before, after = (_short(text) for text in self.places[key].rendered())
        return Fault(*key, line=self.places[key].node.lineno, before=before, after=after)

    def planted(self, key: tuple[str, str, str, str, int]) -> str:
        """The source with the fault."""
        place = self.places[key]
        node = place.node
        _, after = place.rendered()
        if isinstance(node, ast.expr) and not isinstance(place.change, str):
            after = f"({after})"
        lines = self._source.encode().splitlines(keepends=True)  # columns of the tree count bytes
        assert node.end_lineno is not None and node.end_col_offset is not None
        head = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
        tail = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
        return (head + after.encode() + tail).decode()


def modules(root: Path, sources: tuple[str, ...] = SOURCES) -> list[Module]:
    """All sources below `root`, in the order of their paths."""
    paths = sorted(str(path.relative_to(root)) for source in sources for path in (root / source).rglob("*.py"))
    return [Module.read(root, path) for path in paths]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def _places(tree: ast.Module) -> Iterator[Place]:
    for statement in tree.body:
        yield from _Walk("", False, statement).of_statement()


@dataclass(frozen=True)
class _Walk:
    scope: str
    in_function: bool
    statement: ast.stmt

    def _place(self, operator: str, node: ast.expr | ast.stmt, change: Callable[[Any], ast.AST] | str) -> Place:
        return Place(self.scope, operator, node, self.statement, self.in_function, change)

    def _inside(self, statements: list[ast.stmt]) -> Iterator[Place]:
        for statement in statements:
            yield from _Walk(self.scope, self.in_function, statement).of_statement()

    def of_statement(self) -> Iterator[Place]:
        node = self.statement
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for default in (*node.args.defaults, *node.args.kw_defaults):
                    if default is not None:
                        yield from self._of(default)
                inside = _Walk(f"{self.scope}.{node.name}".lstrip("."), True, node)
                yield from inside._inside(node.body)
            case ast.ClassDef():
                yield from _Walk(f"{self.scope}.{node.name}".lstrip("."), False, node)._inside(node.body)
            case ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.Delete():
                return
            case ast.Assign() | ast.AnnAssign() if not self.in_function and _names_a_constant(node):
                return
            case ast.AnnAssign():
                if node.value is not None:
                    yield from self._of(node.value)
            case ast.AugAssign():
                if type(node.op) in ARITHMETIC and not _is_text(node.value):
                    yield self._place("assignment", node, _other_operator)
                yield from self._of(node.value)
            case ast.Return():
                if node.value is not None:
                    if not (isinstance(node.value, ast.Constant) and node.value.value in (None, True, False)):
                        yield self._place("return", node.value, "None")
                    yield from self._of(node.value)
            case ast.Expr():
                call = node.value.value if isinstance(node.value, ast.Await) else node.value
                if isinstance(call, ast.Call) and not _is_unobserved(call):
                    yield self._place("call dropped", node, "pass")
                yield from self._of(node.value)
            case ast.If() | ast.While():
                if _is_for_types(node.test):
                    yield from self._inside(node.orelse)
                    return
                yield from self._of_condition(node.test)
                yield from self._inside(node.body)
                yield from self._inside(node.orelse)
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from self._of_part(child)

    def _of_part(self, node: ast.AST) -> Iterator[Place]:
        """Of what a statement holds: statements, expressions, or what holds these in its turn."""
        match node:
            case ast.stmt():
                yield from self._inside([node])
            case ast.expr():
                yield from self._of(node)
            case ast.match_case():
                if node.guard is not None:
                    yield from self._of_condition(node.guard)
                yield from self._inside(node.body)
            case ast.ExceptHandler():
                yield from self._inside(node.body)
            case ast.comprehension():
                yield from self._of(node.iter)
                for condition in node.ifs:
                    yield from self._of_condition(condition)
            case ast.withitem():
                yield from self._of(node.context_expr)
            case ast.keyword():
                yield from self._of(node.value)
            case ast.arguments():
                for default in (*node.defaults, *node.kw_defaults):
                    if default is not None:
                        yield from self._of(default)

    def _of_condition(self, node: ast.expr) -> Iterator[Place]:
        is_single = isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], NEGATED_ALREADY)
        if not is_single and not isinstance(node, ast.Constant):
            yield self._place("condition negated", node, _negated)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._of(node.operand)  # the negation is taken off already
        else:
            yield from self._of(node)

    def _of(self, node: ast.expr) -> Iterator[Place]:
        match node:
            case ast.JoinedStr():
                return
            case ast.Constant():
                if isinstance(node.value, bool):
                    yield self._place("truth", node, str(not node.value))
                elif isinstance(node.value, int):
                    yield self._place("off by one", node, str(node.value + 1))
                return
            case ast.Compare():
                for index, operator in enumerate(node.ops):
                    yield self._place("comparison", node, _with_comparison(index, COMPARISONS[type(operator)]))
            case ast.BoolOp():
                yield self._place("and/or", node, _other_junction)
            case ast.BinOp():
                is_types = isinstance(node.op, ast.BitOr) and (_is_type(node.left) or _is_type(node.right))
                is_text = _is_text(node.left) or _is_text(node.right)
                if type(node.op) in ARITHMETIC and not is_types and not is_text:
                    yield self._place("arithmetic", node, _other_operator)
            case ast.UnaryOp():
                if isinstance(node.op, ast.Not):
                    yield self._place("not dropped", node, _operand)
                elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
                    yield self._place("sign dropped", node, _operand)
            case ast.IfExp():
                yield from self._of_condition(node.test)
                yield from self._of(node.body)
                yield from self._of(node.orelse)
                return
            case ast.Call():
                if _is_unobserved(node):
                    return
                name = _called(node)
                if name in OPPOSITES:
                    yield self._place("min/max", node, _with_opposite)
                yield from self._of(node.func)
                types_first, types_second = name == "cast", name in ("isinstance", "issubclass")
                for argument in node.args[1:] if types_first else node.args[:1] if types_second else node.args:
                    yield from self._of(argument)
                for keyword in node.keywords:
                    yield from self._of(keyword.value)
                return
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            yield from self._of_part(child)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_unobserved(call: ast.Call) -> bool:
    """Whether it writes a log, or tells triton's compiler something."""
    name = _called(call)
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = ast.unparse(call.func.value)
    if name in LOGGING:
        return "log" in owner.lower()
    return owner == "warnings" or (owner == "tl" and name in COMPILER_HINTS)


def _is_for_types(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return "TYPE_CHECKING" in text or text.startswith(("__name__ ==", "sys.version_info"))


def _names_a_constant(node: ast.Assign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return bool(names) and all(name.isupper() or name.startswith("__") for name in names)


def _is_type(node: ast.expr) -> bool:
    """Whether an operand of `|` is the name of a class, None or such a union."""
    if isinstance(node, ast.BinOp):
        return _is_type(node.left)
    if isinstance(node, ast.Subscript):
        return _is_type(node.value)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    is_class = name.lstrip("_")[:1].isupper() and not name.isupper()
    return (
        is_class
        or name in ("int", "str", "float", "bool", "bytes")
        or (isinstance(node, ast.Constant) and node.value is None)
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _with_comparison(index: int, operator: type[ast.cmpop]) -> Callable[[ast.Compare], ast.AST]:
    def change(node: ast.Compare) -> ast.AST:
        node.ops[index] = operator()
        return node

    return change


def _other_operator(node: ast.BinOp | ast.AugAssign) -> ast.AST:
    node.op = ARITHMETIC[type(node.op)]()
    return node


def _other_junction(node: ast.BoolOp) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _operand(node: ast.UnaryOp) -> ast.AST:
    return node.operand


def _negated(node: ast.expr) -> ast.AST:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return ast.UnaryOp(ast.Not(), node)


def _with_opposite(node: ast.Call) -> ast.AST:
    func = cast(Any, node.func)
    if isinstance(func, ast.Attribute):
        func.attr = OPPOSITES[func.attr]
    else:
        func.id = OPPOSITES[func.id]
    return node
