"""Calls as one JSON list: [{"name": "f", "parameters": {…}}, …], as the grammar of forced calls (`guide`) has it."""

from __future__ import annotations

from inflight.openai.tools.call_machine import CallMachine


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
        self._state = self._read_list
