"""The events of a response's stream as server-sent events: numbered, and each named in a line of its own."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.openai.responses.output_item import Event

_encode = msgspec.json.Encoder().encode


class EventFrames:
    """Of one stream."""

    def __init__(self) -> None:
        self._num_events = 0

    def frame(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def frames(self, events: list[Event]) -> bytes:
        return b"".join([self.frame(kind, fields) for kind, fields in events])
