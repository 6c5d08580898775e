"""Calls as one JSON list: [{"name": "f", "parameters": {…}}, …], as the grammar of forced calls (`guide`) has it."""

from __future__ import annotations

from inflight.openai.tools.call_machine import CallMachine
from inflight.openai.tools.events import Event


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


class ForcedParser(JsonListParser):
    """Of text that follows that grammar: a call that it breaks off before its arguments is nevertheless one."""

    def finish(self) -> list[Event]:
        name = self._name_of_last()
        if name:
            self._start_call(name)
        return super().finish()

    def _name_of_last(self) -> str:
        """Of the call that the text has begun and not started; "" if it is not known."""
        if self._is_calling or self._state == self._read_text or not (self._num_held or self._unread):
            return ""
        if self._state == self._read_call and self._call.name:
            return self._call.name
        (first, *others) = self._names
        return "" if others or self._num_calls else first
