"""What the model writes, as the items of a response: text becomes items, and events that tell of them."""

from __future__ import annotations

from typing import Any

from inflight.openai.chat_format import ChatFormat, ChatReader, Piece, Reasoning
from inflight.openai.responses.output_item import CallItem, Event, MessageItem, OutputItem, ReasoningItem
from inflight.openai.tools.events import Content, ToolCallStarted


class Output:
    """Of one response. One item is open at a time: the last."""

    def __init__(self, format: ChatFormat | None) -> None:
        """`format`: None if all text is content."""
        self._reader = ChatReader(format or ChatFormat())
        self._items: list[OutputItem] = []
        self._log_probs: list[dict[str, Any]] = []
        """Of tokens whose text has not come yet."""

    def add(self, text: str, log_probs: list[dict[str, Any]]) -> list[Event]:
        """`log_probs`: of the tokens that have come with this text; only where all text is content."""
        self._log_probs += log_probs
        return self._take(self._reader.feed(text))

    def finish(self, *, is_cut: bool) -> list[Event]:
        """No more text comes. `is_cut`: whether the model would have gone on."""
        events = self._take(self._reader.finish())
        if self._items:
            last = self._items[-1]
            self._give_log_probs(last)
            events += last.closing(is_cut=is_cut)
        return events

    def fields(self) -> list[dict[str, Any]]:
        """All items as JSON, as far as they have come."""
        return [item.fields() for item in self._items]

    def _take(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, Content):
                item = self._last_or_new(MessageItem, events)
                self._give_log_probs(item)
                events.append(item.grow(piece.text))
            elif isinstance(piece, Reasoning):
                events.append(self._last_or_new(ReasoningItem, events).grow(piece.text))
            elif isinstance(piece, ToolCallStarted):
                self._open(CallItem(len(self._items), piece.id, piece.name), events)
            else:
                events.append(self._items[-1].grow(piece.text))
        return events

    def _last_or_new(self, kind: type[MessageItem] | type[ReasoningItem], events: list[Event]) -> OutputItem:
        if not self._items or not isinstance(self._items[-1], kind):
            self._open(kind(len(self._items)), events)
        return self._items[-1]

    def _open(self, item: OutputItem, events: list[Event]) -> None:
        if self._items:
            events += self._items[-1].closing(is_cut=False)
        self._items.append(item)
        events += item.opening()

    def _give_log_probs(self, item: OutputItem) -> None:
        if isinstance(item, MessageItem):
            item.log_probs += self._log_probs
            self._log_probs = []
