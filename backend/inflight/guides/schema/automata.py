"""Regular expressions that are made of others: of the texts that some of them match and others do not.

The expressions are read by Python's own parser, walked through together as deterministic automata, and what they reach
is written as one expression again. All of it is bounded by counts.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from inflight.guides.schema.patterns import code_of

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

MAX_POSITIONS = 2_000
"""Characters of the expressions, each as often as it is repeated."""
MAX_STATES = 200
"""Of the automaton."""
MAX_TEXT = 20_000
"""Characters of an expression that is made."""
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""No text has them."""
_BRACED = re.compile(r"\\[xu]\{([0-9A-Fa-f]{1,6})\}")

Ranges = tuple[tuple[int, int], ...]
Flags = tuple[bool, ...]
Spend = Callable[[int], None]
"""Is told of the work, in sets of states and the like, and raises what it likes."""


class _Nfa:
    """Of one expression, which searches: states are numbers, from 0, and the last one is reached by what it matches."""

    def __init__(self, pattern: str) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = [[]]
        self.free: list[list[tuple[str, int]]] = [[]]
        """Steps without a character: "" everywhere, "^" at the beginning only, "$" at the end only."""
        self._any = _complement(((10, 10),))
        try:
            text = _BRACED.sub(lambda braced: f"\\U{int(braced[1], 16):08X}", pattern)
            tree = _parser.parse(text)
        except (re.error, OverflowError, RecursionError):
            raise Unread from None
        self.steps[0].append((((0, LAST),), 0))
        self.end = self._sequence(tree, self._next(0))
        self.steps[self.end].append((((0, LAST),), self.end))

    def _state(self) -> int:
        if len(self.steps) > MAX_POSITIONS:
            raise Unread
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def _next(self, state: int, mark: str = "") -> int:
        after = self._state()
        self.free[state].append((mark, after))
        return after

    def _sequence(self, tree: Iterable[Any], state: int) -> int:
        for name, value in tree:
            state = self._part(str(name), value, state)
        return state

    def _part(self, name: str, value: Any, state: int) -> int:
        if name == "SUBPATTERN":
            outer, self._any = self._any, ((0, LAST),) if value[1] == re.DOTALL else self._any
            state = self._sequence(value[3], state)
            self._any = outer
            return state
        if name == "BRANCH":
            end = self._state()
            for branch in value[1]:
                self.free[self._sequence(branch, self._next(state))].append(("", end))
            return end
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, part = value
            for _ in range(low):
                state = self._sequence(part, state)
            if high == _parser.MAXREPEAT:
                start = self._next(state)
                end = self._sequence(part, start)
                self.free[end].append(("", start))
                return self._next(start)
            outs = [state]
            for _ in range(high - low):
                outs.append(self._sequence(part, self._next(outs[-1])))
            for out in outs[:-1]:
                self.free[out].append(("", outs[-1]))
            return self._next(outs[-1])
        if name == "AT" and str(value) in ("AT_BEGINNING", "AT_END"):
            return self._next(state, "^" if str(value) == "AT_BEGINNING" else "$")
        after = self._state()
        self.steps[state].append((self._any if name == "ANY" else _characters(name, value), after))
        return after

    def closed(self, states: Iterable[int], marks: str) -> frozenset[int]:
        """With those that are reached without a character."""
        found, left = set(states), list(states)
        while left:
            for mark, after in self.free[left.pop()]:
                if mark in marks and after not in found:
                    found.add(after)
                    left.append(after)
        return frozenset(found)


class Unread(Exception):
    """An expression that is not read here, or is beyond the bounds."""


def _characters(name: str, value: Any) -> Ranges:
    if name == "LITERAL":
        return ((value, value),)
    if name == "NOT_LITERAL":
        return _complement(((value, value),))
    if name != "IN":
        raise Unread
    ranges: list[tuple[int, int]] = []
    for kind, inner in value:
        if str(kind) == "LITERAL":
            ranges.append((inner, inner))
        elif str(kind) == "RANGE":
            ranges.append(inner)
        elif str(kind) != "NEGATE":
            raise Unread
    return _complement(tuple(ranges)) if value and str(value[0][0]) == "NEGATE" else tuple(ranges)


def _complement(ranges: Ranges) -> Ranges:
    out, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            out.append((start, low - 1))
        start = max(start, high + 1)
    return (*out, (start, LAST)) if start <= LAST else tuple(out)


class Automaton:
    """Of several expressions at once: a state says which of them a text that leads to it matches."""

    def __init__(self, patterns: tuple[str, ...], spend: Spend) -> None:
        self._spend = spend
        nfas = [_Nfa(pattern) for pattern in patterns]
        self._letters = _letters({ranges for nfa in nfas for steps in nfa.steps for ranges, _ in steps}, spend)
        start = tuple(nfa.closed((0,), "^") for nfa in nfas)
        numbers = {start: 0}
        self._steps: list[dict[int, int]] = []
        self.flags: list[Flags] = []
        for state in (left := [start]):
            is_first = "^$" if state is start else "$"
            self.flags.append(tuple(nfa.end in nfa.closed(own, is_first) for nfa, own in zip(nfas, state, strict=True)))
            spend(len(self._letters) * (1 + sum(map(len, state))))
            steps: dict[int, int] = {}
            for letter, (sets, _) in enumerate(self._letters):
                after = tuple(
                    nfa.closed({to for at in own for ranges, to in nfa.steps[at] if ranges in sets}, "")
                    for nfa, own in zip(nfas, state, strict=True)
                )
                if after not in numbers:
                    if len(numbers) >= MAX_STATES:
                        raise Unread
                    numbers[after] = len(numbers)
                    left.append(after)
                steps[letter] = numbers[after]
            self._steps.append(steps)

    def expression(self, takes: Callable[[Flags], bool]) -> str | None:
        """An anchored expression of the texts whose flags `takes` takes. None: there are none."""
        accepting = {state for state, flags in enumerate(self.flags) if takes(flags)}
        block = self._minimised(accepting)
        edges: dict[int, dict[int, tuple[str, ...]]] = {-1: {block[0]: ("",)}}
        for state, steps in enumerate(self._steps):
            if block[state] in edges:
                continue
            by_target: dict[int, list[tuple[int, int]]] = {}
            for letter, after in steps.items():
                by_target.setdefault(block[after], []).extend(self._letters[letter][1])
            edges[block[state]] = {to: (_class(ranges),) for to, ranges in by_target.items()}
        for state in accepting:
            edges[block[state]][-2] = ("",)
        found = _eliminated(edges, self._spend)
        return None if found is None else f"^{found}$"

    def _minimised(self, accepting: set[int]) -> list[int]:
        """State -> number of those that the same texts lead on from."""
        block = [int(state in accepting) for state in range(len(self._steps))]
        while True:
            self._spend(len(self._letters) * len(block) // 4)
            kinds: dict[tuple[int, ...], int] = {}
            finer = [
                kinds.setdefault((block[state], *(block[after] for after in steps.values())), len(kinds))
                for state, steps in enumerate(self._steps)
            ]
            if len(kinds) == len(set(block)):
                return block
            block = finer


def _letters(sets: set[Ranges], spend: Spend) -> list[tuple[set[Ranges], list[tuple[int, int]]]]:
    """Characters that no set tells apart: the sets that hold them, and their ranges."""
    edges = {0, LAST + 1, SURROGATES[0], SURROGATES[1] + 1}
    edges |= {edge for ranges in sets for low, high in ranges for edge in (low, high + 1)}
    ordered = sorted(edges)
    spend(len(ordered) * sum(map(len, sets)) // 4)
    found: dict[frozenset[Ranges], list[tuple[int, int]]] = {}
    for low, after in pairwise(ordered):
        if not SURROGATES[0] <= low <= SURROGATES[1]:
            holding = frozenset(ranges for ranges in sets if any(start <= low <= end for start, end in ranges))
            found.setdefault(holding, []).append((low, after - 1))
    return [(set(holding), ranges) for holding, ranges in found.items()]


def _class(ranges: list[tuple[int, int]]) -> str:
    """One character of them. Classes with the first character are written by what they lack."""
    lacking = _complement((*ranges, SURROGATES))
    if not lacking:
        return "(?s:.)"
    is_negated = lacking[0][0] > 0
    shown = lacking if is_negated else _complement((*lacking, SURROGATES))
    inside = "".join(code_of(low) + (f"-{code_of(high)}" if high > low else "") for low, high in shown)
    return f"[{'^' if is_negated else ''}{inside}]"


def _eliminated(edges: dict[int, dict[int, tuple[str, ...]]], spend: Spend) -> str | None:
    """The expression of the ways from -1 to -2: states go one after the other, and what leads around each stays."""
    while left := [state for state in edges if state >= 0]:
        # First those that the fewest ways lead through: their expressions are repeated least.
        state = min(left, key=lambda at: len(edges[at]) * sum(at in targets for targets in edges.values()))
        spend(len(left))
        outs = edges.pop(state)
        loop = _star(outs.pop(state, ()))
        for targets in edges.values():
            if (into := targets.pop(state, None)) is not None:
                for to, way in outs.items():
                    made = f"{_joined(into)}{loop}{_joined(way)}"
                    spend(1 + len(made) // 8)
                    if len(made) > MAX_TEXT:
                        raise Unread
                    targets[to] = tuple(dict.fromkeys((*targets.get(to, ()), made)))
    ways = edges[-1].get(-2)
    if ways is None:
        return None
    text = _joined(ways)
    if len(text) > MAX_TEXT:
        raise Unread
    return text


def _joined(ways: tuple[str, ...]) -> str:
    written = [way for way in ways if way]
    if len(written) == len(ways) == 1:
        return written[0]
    return f"(?:{'|'.join(written)}){'?' if len(written) < len(ways) else ''}" if written else ""


def _star(ways: tuple[str, ...]) -> str:
    written = [way for way in ways if way]
    return f"(?:{'|'.join(written)})*" if written else ""


def combined(patterns: tuple[str, ...], takes: Callable[[Flags], bool], spend: Spend) -> str | None:
    """An anchored expression of the texts of which `takes` takes the flags: which of `patterns` a text matches. None:
    there are none. Raises Unread."""
    return Automaton(patterns, spend).expression(takes)


def divided(patterns: tuple[str, ...], spend: Spend) -> dict[Flags, str]:
    """Which of `patterns` a text matches, of all that can be -> an anchored expression of such texts. Raises Unread."""
    automaton = Automaton(patterns, spend)
    found = {flags: automaton.expression(flags.__eq__) for flags in sorted(set(automaton.flags))}
    return {flags: expression for flags, expression in found.items() if expression is not None}
