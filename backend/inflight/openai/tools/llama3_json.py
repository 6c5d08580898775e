"""Calls of Llama 3.1 and later: {"name": "f", "parameters": {…}}, several with semicolons between them."""

from __future__ import annotations

from inflight.openai.tools.call_machine import CallMachine


class Llama3JsonParser(CallMachine):
    """Without the tag, calls are the whole text: it then begins with one."""

    tag = "<|python_tag|>"
    opening = "{"
    separator = ";"

    def _begin_calls(self) -> None:
        self._begin_call()
