"""What becomes of the text of a chat's choice: deltas of a stream's chunks, or the message of an answer.

Nothing else makes JSON of a chat's text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.asking.chat_format import ChatFormat, ChatReader, Piece
from inflight.asking.tools.events import Content, Reasoning, ToolCallStarted

_encode = msgspec.json.Encoder().encode

ROLE = b'{"role":"assistant","content":""}'
"""A choice's first delta."""
CONTENT = b'{"content":'
"""The beginning of a delta of content, before the text as JSON and a bracket."""
NOTHING = b"{}"
"""The delta of a chunk that has only a finish reason."""


class ChatDeltas:
    """Of one choice of a stream."""

    def __init__(self, format: ChatFormat | None = None) -> None:
        """`format`: None if all text is content."""
        self._reader = None if format is None else ChatReader(format)

    def feed(self, text: str) -> list[bytes]:
        """The deltas, each a JSON object, that this text makes."""
        if self._reader is None:
            return [CONTENT + _encode(text) + b"}"] if text else []
        return [_encode(_delta(piece)) for piece in self._reader.feed(text)]

    def finish(self, reason: str) -> tuple[list[bytes], str]:
        """The deltas that are left at the end, and the finish reason. `reason`: the engine's."""
        if self._reader is None:
            return [], reason
        return [_encode(_delta(piece)) for piece in self._reader.finish()], self._reader.finish_reason(reason)


class ChatMessage:
    """Of one choice of an answer that is not streamed."""

    def __init__(self, format: ChatFormat | None = None) -> None:
        """`format`: None if all text is content."""
        self._reader = ChatReader(format or ChatFormat())
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        """Of each call."""

    def feed(self, text: str) -> None:
        self._add(self._reader.feed(text))

    def finish(self, reason: str) -> tuple[dict[str, Any], str]:
        """The message, and the finish reason. `reason`: the engine's."""
        self._add(self._reader.finish())
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(arguments)
        more = {"reasoning": "".join(self._reasoning), "tool_calls": self._calls}
        given = {name: value for name, value in more.items() if value}
        message = {"role": "assistant", "content": "".join(self._content) or (None if given else ""), **given}
        return message, self._reader.finish_reason(reason)

    def _add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Content):
                self._content.append(piece.text)
            elif isinstance(piece, Reasoning):
                self._reasoning.append(piece.text)
            elif isinstance(piece, ToolCallStarted):
                self._calls.append(_started(piece))
                self._arguments.append([])
            else:
                self._arguments[piece.index].append(piece.text)


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning": piece.text}
    if isinstance(piece, ToolCallStarted):
        return {"tool_calls": [{"index": piece.index, **_started(piece)}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _started(piece: ToolCallStarted) -> dict[str, Any]:
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
