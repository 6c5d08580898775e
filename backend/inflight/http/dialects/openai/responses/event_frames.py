"""The events of a response's stream as server-sent events: numbered, and each named in a line of its own.

    event: response.output_text.delta
    data: {"type":…,"item_id":…,"output_index":0,"content_index":0,"sequence_number":   7   ,"delta":   " dog"   }

A delta costs its text's own JSON and one formatting.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from inflight.http.event_frame import event_frame

_encode = msgspec.json.Encoder().encode


class Delta(NamedTuple):
    """An event of new text, of which there may be one for each token."""

    head: bytes
    """See `delta_head`."""
    text: str
    log_probs: list[dict[str, Any]] | None = None
    """None where the event has no such field."""


Event = tuple[str, dict[str, Any]] | Delta
"""Its type and its other fields, all but the sequence number."""


def delta_head(kind: str, place: dict[str, Any]) -> bytes:
    """The beginning of the frames of an item's deltas. `place`: their item and its part."""
    return event_frame(kind, {"type": kind, **place}).removesuffix(b"}\n\n") + b',"sequence_number":'


class EventFrames:
    """Of one stream."""

    def __init__(self) -> None:
        self._num_events = 0

    def frames(self, events: list[Event]) -> bytes:
        return b"".join([self.frame(event) for event in events])

    def frame(self, event: Event) -> bytes:
        number = self._num_events
        self._num_events += 1
        if isinstance(event, Delta):
            log_probs = b"" if event.log_probs is None else b',"logprobs":' + _encode(event.log_probs)
            return b'%b%d,"delta":%b%b}\n\n' % (event.head, number, _encode(event.text), log_probs)
        kind, fields = event
        return event_frame(kind, {"type": kind, "sequence_number": number, **fields})
