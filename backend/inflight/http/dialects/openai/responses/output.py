"""What the model writes, as the items of a response: text becomes items, and events that tell of them."""

from __future__ import annotations

from typing import Any, TypeVar

from inflight.asking.chat_format import ChatFormat, ChatReader, Piece
from inflight.asking.tools.events import Content, Reasoning, ToolCallStarted
from inflight.http.dialects.openai.responses.event_frames import Event
from inflight.http.dialects.openai.responses.output_item import CallItem, MessageItem, OutputItem, ReasoningItem

ItemT = TypeVar("ItemT", MessageItem, ReasoningItem)


class Output:
    """Of one response. One item is open at a time: the last."""

    def __init__(self, format: ChatFormat | None) -> None:
        """`format`: None if all text is content."""
        self._reader = None if format is None else ChatReader(format)
        self._items: list[OutputItem] = []
        self._log_probs: list[dict[str, Any]] = []
        """Of tokens whose text has not come yet."""

    def add(self, text: str, log_probs: list[dict[str, Any]]) -> list[Event]:
        """`log_probs`: of the tokens that have come with this text; only where all text is content."""
        events: list[Event] = []
        if log_probs:
            self._log_probs += log_probs
        if self._reader is not None:
            self._take(self._reader.feed(text), events)
        elif text:
            self._add_content(text, events)
        return events

    @property
    def open_message(self) -> MessageItem | None:
        """To which all further text belongs; None if text may be more than that, or none has come."""
        last = self._items[-1] if self._items else None
        return last if self._reader is None and isinstance(last, MessageItem) else None

    def finish(self, *, is_cut: bool) -> list[Event]:
        """No more text comes. `is_cut`: whether the model would have gone on."""
        events: list[Event] = []
        if self._reader is not None:
            self._take(self._reader.finish(), events)
        if self._items:
            last = self._items[-1]
            if isinstance(last, MessageItem):
                last.log_probs += self._log_probs
            events += last.closing(is_cut=is_cut)
        return events

    def fields(self) -> list[dict[str, Any]]:
        """All items as JSON, as far as they have come."""
        return [item.fields() for item in self._items]

    def _take(self, pieces: list[Piece], events: list[Event]) -> None:
        for piece in pieces:
            if isinstance(piece, Content):
                self._add_content(piece.text, events)
            elif isinstance(piece, Reasoning):
                events.append(self._open(ReasoningItem, events).grow(piece.text))
            elif isinstance(piece, ToolCallStarted):
                self._append(CallItem(len(self._items), piece.id, piece.name), events)
            else:
                events.append(self._items[-1].grow(piece.text))

    def _add_content(self, text: str, events: list[Event]) -> None:
        item = self._open(MessageItem, events)
        if self._log_probs:
            item.log_probs += self._log_probs
            self._log_probs = []
        events.append(item.grow(text))

    def _open(self, kind: type[ItemT], events: list[Event]) -> ItemT:
        """The last item if it is of this kind, else a new one."""
        last = self._items[-1] if self._items else None
        if isinstance(last, kind):
            return last
        item = kind(len(self._items))
        self._append(item, events)
        return item

    def _append(self, item: OutputItem, events: list[Event]) -> None:
        if self._items:
            events += self._items[-1].closing(is_cut=False)
        self._items.append(item)
        events += item.opening()
