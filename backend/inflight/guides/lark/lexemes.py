"""Which parts of a grammar become terminals, so that the library's lexer loses no text.

The lexer reads terminals greedily and never goes back: of `/a*/ "ab"` it reads no text at all. So a part is a terminal
only if its end is certain: no character that may follow it could also continue it, nor continue another terminal that
may stand in its place. Terminals for which this is not known are cut to their parts, down to single characters, among
which nothing is ambiguous. Several schemas in one place are the library's to tell apart: it reads them as alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from inflight.guides.lark.expression import (
    ALL,
    NOTHING,
    Characters,
    Either,
    Grammar,
    Json,
    Node,
    Reference,
    Repeat,
    Sequence,
    Text,
    Until,
    Without,
    children,
    is_regular,
    references,
)
from inflight.guides.limits import MAX_NEIGHBOURS, MAX_ROUNDS, MAX_TERMINALS
from inflight.guides.refusal import GuideRefused


@lru_cache(maxsize=20_000)
def is_nullable(node: Node) -> bool:
    """Of a regular one: whether it takes the empty text."""
    if isinstance(node, Text):
        return not node.value
    if isinstance(node, Without):
        return True
    if isinstance(node, Sequence):
        return all(map(is_nullable, node.parts))
    if isinstance(node, Either):
        return any(map(is_nullable, node.parts))
    return isinstance(node, Repeat) and (node.low == 0 or is_nullable(node.part))


@lru_cache(maxsize=20_000)
def first_mask(node: Node) -> int:
    """Characters that a text of it may begin with."""
    if isinstance(node, Characters):
        return node.mask
    if isinstance(node, Text):
        return _bit(node.value[0]) if node.value else 0
    if isinstance(node, Json):
        return node.first
    if isinstance(node, (Until, Without)):
        return ALL
    found = 0
    for part in children(node):
        found |= first_mask(part)
        if isinstance(node, Sequence) and not is_nullable(part):
            break
    return found


@lru_cache(maxsize=20_000)
def further_mask(node: Node) -> int:
    """At least the characters that may continue a text of it within it. Exact where each character of a text leaves no
    choice of the part that reads it; anything elsewhere."""
    if isinstance(node, Without):
        return ALL
    if isinstance(node, Json):
        return node.further
    if isinstance(node, Either):
        texts = [part.value for part in node.parts if isinstance(part, Text)]
        if len(texts) == len(node.parts):
            return 0 if _are_free_of_prefixes(tuple(texts)) else ALL
        seen = 0
        for part in node.parts:
            if seen & first_mask(part):
                return ALL
            seen |= first_mask(part)
        return _union(map(further_mask, node.parts))
    if isinstance(node, Sequence):
        found = 0
        for part in node.parts:
            if found & first_mask(part):
                return ALL
            found = further_mask(part) | (found | first_mask(part) if is_nullable(part) else 0)
        return found
    if isinstance(node, Repeat):
        inner = further_mask(node.part)
        if node.high is not None and node.high <= 1:
            return inner
        return ALL if inner & first_mask(node.part) else inner | first_mask(node.part)
    return 0


@lru_cache(maxsize=2_000)
def _are_free_of_prefixes(texts: tuple[str, ...]) -> bool:
    """None is the beginning of another."""
    ordered = sorted(set(texts))
    return not any(later.startswith(earlier) for earlier, later in pairwise(ordered))


def _union(masks: Iterator[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _bit(character: str) -> int:
    return 1 << min(ord(character), 128)


def _texts(node: Node) -> tuple[str, ...] | None:
    if isinstance(node, Text):
        return (node.value,)
    if isinstance(node, Either) and all(isinstance(part, Text) for part in node.parts):
        return tuple(part.value for part in node.parts if isinstance(part, Text))
    return None


def cut(node: Node) -> Node | None:
    """A terminal as the parts that it is made of; None = it cannot be cut."""
    if isinstance(node, Text) and len(node.value) > 1:
        return Sequence(tuple(map(Text, node.value)))
    return node if children(node) else None


@dataclass
class _Place:
    """A set of the positions that begin, and end, a part; bits of integers."""

    first: int = 0
    last: int = 0
    is_nullable: bool = False


class Terminals:
    """Of a grammar. Raises GuideRefused if what may follow or replace each other cannot be told apart."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._cut: set[Node] = set()
        for _ in range(MAX_ROUNDS):
            wanted = _Positions(grammar, self).ambiguous()
            if not wanted:
                return
            self._cut |= wanted
        self._cuts_all = True
        _Positions(grammar, self).ambiguous()

    _cuts_all = False
    _work = 0

    def count(self) -> None:
        self._work += 1
        if self._work > MAX_NEIGHBOURS:
            raise GuideRefused("has too many parts that may stand in one place")

    def are(self, node: Node) -> bool:
        """Whether this regular part is one terminal."""
        return is_regular(node) and (not self._cuts_all or cut(node) is None) and node not in self._cut


class _Positions:
    """Places of terminals in a grammar, and which may follow which. What follows a rule follows all its uses."""

    def __init__(self, grammar: Grammar, terminals: Terminals) -> None:
        self._terminals = terminals
        self.nodes: list[Node] = []
        self._follow: list[int] = []
        trees = {name: self._tree(node) for name, node in grammar.rules.items()}
        start = self._tree(grammar.start)
        self._rules = {name: _Place() for name in trees}
        waiting, users = _by_use(grammar)
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            place = self._place(trees[name])
            if place != self._rules[name]:
                self._rules[name] = place
                waiting |= dict.fromkeys(users[name])
        for tree in trees.values():
            self._place(tree, links=True)
        self._start = self._place(start, links=True).first

    def _tree(self, node: Node) -> tuple[Node, list, int]:  # type: ignore[type-arg]
        """The part, its own parts, and its position or -1."""
        if node == NOTHING:
            return node, [], -1
        if isinstance(node, Json) or self._terminals.are(node):
            if len(self.nodes) == MAX_TERMINALS:
                raise GuideRefused(f"has more than {MAX_TERMINALS} parts that a lexer must tell apart")
            self.nodes.append(node)
            self._follow.append(0)
            return node, [], len(self.nodes) - 1
        inner = cut(node) if isinstance(node, Text) else node
        assert inner is not None
        return inner, [self._tree(child) for child in children(inner)], -1

    def _place(self, tree: tuple[Node, list, int], links: bool = False) -> _Place:  # type: ignore[type-arg]
        node, inner, position = tree
        self._terminals.count()
        if position >= 0:
            return _Place(1 << position, 1 << position, is_regular(node) and is_nullable(node))
        if isinstance(node, Reference):
            return self._rules[node.name]
        places = [self._place(child, links) for child in inner]
        if isinstance(node, Either):
            return _Place(
                _union(place.first for place in places),
                _union(place.last for place in places),
                any(place.is_nullable for place in places),
            )
        if isinstance(node, Repeat):
            (place,) = places
            if links and (node.high is None or node.high > 1):
                self._link(place.last, place.first)
            return _Place(place.first, place.last, place.is_nullable or node.low == 0)
        whole = _Place(is_nullable=True)
        for place in places:
            if links:
                self._link(whole.last, place.first)
            whole = _Place(
                whole.first | place.first if whole.is_nullable else whole.first,
                whole.last | place.last if place.is_nullable else place.last,
                whole.is_nullable and place.is_nullable,
            )
        return whole

    def _link(self, before: int, behind: int) -> None:
        for position in _bits(before):
            self._follow[position] |= behind

    def ambiguous(self) -> set[Node]:
        """Terminals to cut. Raises GuideRefused if there is one that cannot be."""
        found: set[Node] = set()
        firsts: dict[int, int] = {}
        for position, node in enumerate(self.nodes):
            further, behind = further_mask(node), self._follow[position]
            if not further:
                continue
            if behind not in firsts:
                firsts[behind] = _union(first_mask(self.nodes[other]) for other in _bits(behind))
            if further & firsts[behind]:
                others = (self.nodes[other] for other in _bits(behind))
                self._add(found, (node,), next(other for other in others if further & first_mask(other)))
        for one, other in self._rivals():
            self._add(found, (one, other), other)
        return found

    def _add(self, found: set[Node], nodes: tuple[Node, ...], other: Node) -> None:
        able = [node for node in nodes if cut(node) is not None]
        if able:
            found.update(able)
        elif len(nodes) > 1:
            raise GuideRefused(f"has {_called(nodes[0])} and {_called(other)} where they cannot be told apart")
        else:
            raise GuideRefused(f"has {_called(nodes[0])} directly before {_called(other)}, which could continue it")

    def _rivals(self) -> Iterator[tuple[Node, Node]]:
        """Pairs that may stand in one place, and cannot be told apart."""
        waiting = [self._start, *self._follow]
        seen: set[int] = set()
        while waiting:
            group = waiting.pop()
            if group in seen:
                continue
            seen.add(group)
            places: dict[Node, int] = {}
            several: set[Node] = set()
            for position in _bits(group):
                self._terminals.count()
                node, follow = self.nodes[position], self._follow[position]
                if node in places and places[node] != follow:
                    several.add(node)
                places[node] = places.get(node, 0) | follow
            waiting += [places[node] for node in several]
            texts = sorted(node.value for node in places if isinstance(node, Text))
            for earlier, later in pairwise(texts):
                if later.startswith(earlier):
                    yield Text(earlier), Text(later)
            nodes = list(places)
            for number, node in enumerate(nodes):
                if isinstance(node, Text):
                    continue
                for place, rival in enumerate(nodes):
                    self._terminals.count()
                    if (place > number or isinstance(rival, Text)) and first_mask(node) & first_mask(rival):
                        if not _are_told_apart(node, rival):
                            yield node, rival
                        elif _may_be_equal(node, rival) and places[node] != places[rival]:
                            waiting.append(places[node] | places[rival])


def _by_use(grammar: Grammar) -> tuple[dict[str, None], dict[str, list[str]]]:
    """Rules, those that others use before these as far as there is such an order, and which use each."""
    order: dict[str, None] = {}
    users: dict[str, list[str]] = {name: [] for name in grammar.rules}
    uses = {name: list(dict.fromkeys(references(node))) for name, node in grammar.rules.items()}
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    begun: set[str] = set()
    for root in references(grammar.start):
        stack = [(root, iter(uses[root]))] if root not in begun else []
        begun.add(root)
        while stack:
            name, rest = stack[-1]
            fresh = next((other for other in rest if other not in begun), None)
            if fresh is None:
                order[name] = None
                stack.pop()
            else:
                begun.add(fresh)
                stack.append((fresh, iter(uses[fresh])))
    return order, users


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _is_character(node: Node) -> bool:
    return isinstance(node, Characters) or (isinstance(node, Text) and len(node.value) == 1)


def _are_told_apart(one: Node, other: Node) -> bool:
    """Two that may begin alike and stand in one place."""
    if _is_character(one) and _is_character(other):
        return True
    if isinstance(one, Json) and isinstance(other, Json):
        return True  # the library reads several schemas as one with alternatives
    texts, others = _texts(one), _texts(other)
    if texts is not None and others is not None:
        return _are_free_of_prefixes((*texts, *others)) and not set(texts) & set(others)
    if isinstance(one, (Until, Without)) and isinstance(other, (Until, Without)):
        return one.stops == other.stops
    return _ends_at(one, other) or _ends_at(other, one)


def _ends_at(free: Node, other: Node) -> bool:
    """Whether free text holds a text nowhere: what has read that is no free text, and what goes on otherwise is."""
    return isinstance(free, (Until, Without)) and isinstance(other, Text) and other.value in free.stops


def _may_be_equal(one: Node, other: Node) -> bool:
    """Whether both may read the same text."""
    if isinstance(one, (Until, Without)) and isinstance(other, (Until, Without)):
        return one == other
    if _ends_at(one, other) or _ends_at(other, one):
        return False
    texts, others = _texts(one), _texts(other)
    return texts is None or others is None or bool(set(texts) & set(others))


def _called(node: Node) -> str:
    if isinstance(node, Json):
        return "JSON"
    if isinstance(node, (Until, Without)):
        return "free text"
    return f"the text {node.value[:30]!r}" if isinstance(node, Text) else "a set of characters"
