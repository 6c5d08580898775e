"""The items of a conversation as the messages of a chat: what chat templates take."""

from __future__ import annotations

from typing import Any

from inflight.http.dialects.openai.responses.items import FunctionCall, FunctionCallOutput, Item, Message, Reasoning


def chat_messages(items: list[Item], instructions: str | None = None) -> list[dict[str, Any]]:
    """What the model has written between two messages of others is one message: reasoning, text and calls."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn = _Turn()
    for item in items:
        if turn.is_over_before(item):
            messages += turn.messages()
            turn = _Turn()
        if isinstance(item, Reasoning):
            turn.reasoning += [part.text for part in item.content or item.summary or ()]
        elif isinstance(item, FunctionCall):
            turn.calls.append(_call(item))
        elif isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif item.role == "assistant":
            turn.content = str(item.content)
        else:
            messages.append({"role": item.role, "content": item.content})
    return messages + turn.messages()


class _Turn:
    """What the model has written, while its items are read."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: str | None = None
        self.calls: list[dict[str, Any]] = []

    def is_over_before(self, item: Item) -> bool:
        """Its items come in this order; whatever comes out of it begins another message."""
        if isinstance(item, FunctionCall):
            return False
        if isinstance(item, Reasoning):
            return self.content is not None or bool(self.calls)
        is_text = isinstance(item, Message) and item.role == "assistant"
        return not is_text or self.content is not None or bool(self.calls)

    def messages(self) -> list[dict[str, Any]]:
        """One, or none of an empty turn."""
        if self.content is None and not self.calls and not self.reasoning:
            return []
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning:
            message["reasoning"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return [message]


def _call(item: FunctionCall) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}
