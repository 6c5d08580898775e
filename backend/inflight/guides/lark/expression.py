"""What all kinds of guides are read to, and Lark is written from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

ALL = (1 << 129) - 1
"""A set of characters for comparisons: a bit for each of ASCII, and one for all others together."""
LAST = 0x10FFFF

CLASS_MASKS = {
    r"\p{L}": sum(1 << ord(c) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"),
    r"\p{N}": sum(1 << ord(c) for c in "0123456789"),
    r"\p{Nd}": sum(1 << ord(c) for c in "0123456789"),
}
"""ASCII characters of the classes that `\\w` and `\\d` are made of; other classes may hold any."""


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: tuple[tuple[int, int], ...] = ()
    classes: tuple[str, ...] = ()
    """In the syntax of Rust's crate regex-syntax."""
    is_negated: bool = False

    @property
    def mask(self) -> int:
        """At least the characters of the set."""
        found = 0
        for low, high in self.ranges:
            if low < 128:
                found |= (1 << (min(high, 127) + 1)) - (1 << low)
            if high >= 128:
                found |= 1 << 128
        for name in self.classes:
            known = CLASS_MASKS.get(name)
            if known is None:
                return ALL
            found |= known | 1 << 128
        return (ALL & ~found) | 1 << 128 if self.is_negated else found


@dataclass(frozen=True)
class Text:
    """Exactly this; "" = nothing."""

    value: str


@dataclass(frozen=True)
class _Nested:
    """Parts with parts: their hash is kept, because it takes time for deep ones."""

    kept_hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = tuple(value for name, value in vars(self).items() if name != "kept_hash")
        object.__setattr__(self, "kept_hash", hash((type(self), *values)))

    def __hash__(self) -> int:
        return self.kept_hash


@dataclass(frozen=True)
class Sequence(_Nested):
    parts: tuple[Node, ...]

    __hash__ = _Nested.__hash__


@dataclass(frozen=True)
class Either(_Nested):
    parts: tuple[Node, ...]

    __hash__ = _Nested.__hash__


@dataclass(frozen=True)
class Repeat(_Nested):
    part: Node
    low: int = 0
    high: int | None = None
    """None = without an end."""

    __hash__ = _Nested.__hash__


@dataclass(frozen=True)
class Until:
    """Text that ends where `mark` is found in it first, and in which none of `stops` is found before."""

    mark: str
    stops: frozenset[str] = field(default_factory=frozenset)
    """With `mark`."""


@dataclass(frozen=True)
class Without:
    """Any text in which none of `stops` is found."""

    stops: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Json:
    """A text of JSON, which the library's own compiler of schemas reads."""

    schema: str
    """JSON, with the options under `x-guidance`."""
    first: int
    """Set of the characters that it may begin with."""
    further: int
    """Set of the characters that a whole text may go on with."""


@dataclass(frozen=True)
class Reference:
    """A rule of the grammar."""

    name: str


Node = Characters | Text | Sequence | Either | Repeat | Until | Without | Json | Reference

NOTHING = Text("")
ANY_TEXT = Without()


@dataclass(frozen=True)
class Grammar:
    start: Node
    rules: dict[str, Node] = field(default_factory=dict)


def optional(part: Node) -> Node:
    return Repeat(part, 0, 1)


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, (Sequence, Either)):
        return node.parts
    return (node.part,) if isinstance(node, Repeat) else ()


def references(node: Node) -> Iterator[str]:
    if isinstance(node, Reference):
        yield node.name
    for child in children(node):
        yield from references(child)


@lru_cache(maxsize=20_000)
def is_regular(node: Node) -> bool:
    """A lexer can read it alone."""
    return not isinstance(node, (Json, Reference)) and all(map(is_regular, children(node)))


def expanded(node: Node, sizes: dict[str, int] | None = None) -> int:
    """Its parts, each counted as often as it is repeated; of a rule `sizes`, 1 where there is none."""
    if isinstance(node, Text):
        return max(len(node.value), 1)
    if isinstance(node, Reference):
        return (sizes or {}).get(node.name, 1)
    if isinstance(node, (Until, Without)):
        return 1 + sum(map(len, node.stops))
    if isinstance(node, Repeat):
        return expanded(node.part, sizes) * max(node.low, node.high or 1, 1)
    return 1 + sum(expanded(child, sizes) for child in children(node))
