"""What the model writes as content blocks: text becomes blocks, and events that tell of them.

content_block_start
content_block_delta …     text, thinking, or a part of a call's input as JSON text
content_block_stop
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from inflight.asking.chat_format import ChatFormat, ChatReader, Piece
from inflight.asking.tools.events import Content, Reasoning, ToolCallStarted
from inflight.http.event_frame import event_frame

_encode = msgspec.json.Encoder().encode


class ContentBlock:
    """The empty block, the delta that makes it longer, and the name of the text in either."""

    __slots__ = ("_delta", "_empty", "_key", "_pieces")

    def __init__(self, empty: dict[str, Any], delta: str, key: str) -> None:
        self._empty, self._delta, self._key = empty, delta, key
        self._pieces: list[str] = []

    @property
    def kind(self) -> str:
        return str(self._empty["type"])

    def start(self, index: int) -> bytes:
        event = {"type": "content_block_start", "index": index, "content_block": self._empty}
        return event_frame("content_block_start", event)

    def delta_head(self, index: int) -> bytes:
        """What stands before the text as JSON in the frames of deltas, which end with DELTA_TAIL."""
        delta = {"type": "content_block_delta", "index": index, "delta": {"type": self._delta, self._key: ""}}
        return event_frame("content_block_delta", delta).removesuffix(b'""' + DELTA_TAIL)

    def grow(self, text: str) -> None:
        self._pieces.append(text)

    def fields(self) -> dict[str, Any]:
        """The block, once it is whole. The input of a call that was cut, or is no JSON, is an empty object."""
        text = "".join(self._pieces)
        if self.kind != "tool_use":
            return {**self._empty, self._key: text}
        try:
            given = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            given = {}
        return {**self._empty, "input": given}


DELTA_TAIL = b"}}\n\n"


def text_block() -> ContentBlock:
    return ContentBlock({"type": "text", "text": ""}, "text_delta", "text")


def thinking_block() -> ContentBlock:
    """Nobody signs it: it may be sent back as it is."""
    return ContentBlock({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking")


def call_block(call: ToolCallStarted) -> ContentBlock:
    empty = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    return ContentBlock(empty, "input_json_delta", "partial_json")


class ContentBlocks:
    """Of one message. One block is open at a time: the last."""

    def __init__(self, format: ChatFormat | None) -> None:
        """`format`: None if all text is content."""
        # A call of a tool that the request names is a reason as well, unlike at OpenAI.
        self._reader = None if format is None else ChatReader(replace(format, calls_are_a_reason=True))
        self._blocks: list[ContentBlock] = []
        self._head = b""
        """Of the open block's deltas."""
        self._space: tuple[str, list[str]] = "", []
        """White space that was read last, and the kind of block that it begins if text follows."""

    def open(self) -> bytes:
        """Begin: where all text is content, with its block, which may stay empty. Returns the events, as the others
        do."""
        return self._open(text_block()) if self._reader is None else b""

    def add(self, text: str) -> bytes:
        if self._reader is not None:
            return self._take(self._reader.feed(text))
        return self._grow(text) if text else b""

    def finish(self) -> bytes:
        """No more text comes."""
        last = b"" if self._reader is None else self._take(self._reader.finish())
        return last + self._close()

    def finish_reason(self, reason: str) -> str:
        """See ChatReader."""
        return reason if self._reader is None else self._reader.finish_reason(reason)

    def fields(self) -> list[dict[str, Any]]:
        return [block.fields() for block in self._blocks]

    def delta_head(self) -> bytes:
        """Of the open block."""
        return self._head

    def _take(self, pieces: list[Piece]) -> bytes:
        events = []
        for piece in pieces:
            if isinstance(piece, ToolCallStarted):
                events.append(self._open(call_block(piece)))
                continue
            text = piece.text
            if isinstance(piece, Content | Reasoning):
                block = text_block() if isinstance(piece, Content) else thinking_block()
                if not self._blocks or self._blocks[-1].kind != block.kind:
                    if self._space[0] != block.kind:
                        self._space = block.kind, []
                    spaces = self._space[1]
                    spaces.append(text)
                    # Models write line breaks between their thoughts, their answer and their calls.
                    if not text.strip():
                        continue
                    text = "".join(spaces)
                    events.append(self._open(block))
            events.append(self._grow(text))
        return b"".join(events)

    def _open(self, block: ContentBlock) -> bytes:
        closing = self._close()
        index = len(self._blocks)
        self._blocks.append(block)
        self._head = block.delta_head(index)
        self._space = "", []
        return closing + block.start(index)

    def _grow(self, text: str) -> bytes:
        self._blocks[-1].grow(text)
        self._space = "", []
        return b"".join((self._head, _encode(text), DELTA_TAIL))

    def _close(self) -> bytes:
        if not self._blocks:
            return b""
        index = len(self._blocks) - 1
        return event_frame("content_block_stop", {"type": "content_block_stop", "index": index})
