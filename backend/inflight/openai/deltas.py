"""What becomes of the text of a chat's choice: deltas of a stream's chunks, or the message of an answer.

Nothing else makes JSON of a chat's text.
"""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode

ROLE = b'{"role":"assistant","content":""}'
"""A choice's first delta."""
NOTHING = b"{}"
"""The delta of a chunk that has only a finish reason."""


class ChatDeltas:
    """Of one choice of a stream."""

    def feed(self, text: str) -> list[bytes]:
        """The deltas, each a JSON object, that this text makes."""
        return [b'{"content":' + _encode(text) + b"}"] if text else []

    def finish(self, reason: str) -> tuple[list[bytes], str]:
        """The deltas that are left at the end, and the finish reason. `reason`: the engine's."""
        return [], reason


class ChatMessage:
    """Of one choice of an answer that is not streamed."""

    def __init__(self) -> None:
        self._content: list[str] = []

    def feed(self, text: str) -> None:
        self._content.append(text)

    def finish(self, reason: str) -> tuple[dict[str, Any], str]:
        """The message, and the finish reason. `reason`: the engine's."""
        return {"role": "assistant", "content": "".join(self._content)}, reason
