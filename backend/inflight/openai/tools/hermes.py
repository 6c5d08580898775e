"""Calls of Hermes, and of Qwen 2.5 and 3: <tool_call>{"name": "f", "arguments": {…}}</tool_call>."""

from __future__ import annotations

from inflight.openai.tools.call_machine import CallMachine


class HermesParser(CallMachine):
    """The closing tag may be missing."""

    tag = "<tool_call>"
    closing_tag = "</tool_call>"

    def _begin_calls(self) -> None:
        self._begin_call()
