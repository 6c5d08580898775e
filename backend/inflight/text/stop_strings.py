"""Finds stop strings in a text that arrives in pieces, with the automaton of Aho and Corasick (1975).

The automaton's state is the longest suffix of the text that is a prefix of some stop string. Its depth is therefore the
number of characters that must be held back, and the cost of a character does not depend on the number of stop strings.
"""

from __future__ import annotations

from collections import deque


class StopStrings:
    """The automaton of one list of stop strings. Immutable; `StopStringSearch` holds the state of one text."""

    def __init__(self, stop_strings: list[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._matched = [0]
        self._shorter = [0]
        for stop_string in stop_strings:
            self._add(stop_string)
        self._link()

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, 0)

    def depth(self, state: int) -> int:
        """Length of the text's suffix that may become a stop string, in characters."""
        return self._depth[state]

    def matched(self, state: int) -> int:
        """Length of the longest stop string that ends here; 0 if none does."""
        return self._matched[state]

    def _add(self, stop_string: str) -> None:
        state = 0
        for char in stop_string:
            if char not in self._next[state]:
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._matched.append(0)
                self._shorter.append(0)
                self._next[state][char] = len(self._next) - 1
            state = self._next[state][char]
        self._matched[state] = len(stop_string)

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self._shorter[child] = self.step(self._shorter[state], char)
                self._matched[child] = self._matched[child] or self._matched[self._shorter[child]]
                waiting.append(child)


class StopStringSearch:
    """The search in one text, for the stop string that ends first."""

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stop_strings = stop_strings
        self._state = 0
        self._held = ""
        self.found = ""
        """The stop string that was completed."""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns (text that is certainly before any stop string, whether a stop string was completed). Must not be
        called again after it returned True."""
        automaton = self._stop_strings
        pending = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            self._state = automaton.step(self._state, char)
            length = automaton.matched(self._state)
            if length:
                self._held = ""
                self.found = pending[index - length : index]
                return pending[: index - length], True
        certain = len(pending) - automaton.depth(self._state)
        self._held = pending[certain:]
        return pending[:certain], False

    def flush(self) -> str:
        """The text that was held back, once no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held
