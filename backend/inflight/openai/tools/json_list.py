"""Calls as one JSON list: [{"name": "f", "parameters": {…}}, …], as the grammar of forced calls (`guide`) has it."""

from __future__ import annotations

from inflight.openai.tools.call_machine import CallMachine
from inflight.openai.tools.call_reader import WHITE_SPACE


class JsonListParser(CallMachine):
    opening = "["

    def _begin_calls(self) -> None:
        self._state = self._read_bracket

    def _read_bracket(self, text: str, position: int) -> int:
        """At the bracket that opens the list."""
        self._hold(text[position])
        self._begin_call()
        return position + 1

    def _end_call(self) -> None:
        super()._end_call()
        self._state = self._read_comma

    def _read_comma(self, text: str, position: int) -> int:
        """Behind a call in the list."""
        char = text[position]
        if char in WHITE_SPACE:
            return self._hold_gap(text, position)
        if char == ",":
            self._hold(char)
            self._begin_call()
        elif char == "]":
            self._drop_held()
            self._state = self._read_between
        else:
            self._give_up()
            return position
        return position + 1
