"""How the text of a chat's choices is read: what of it is reasoning, what is content, and what calls tools.

Reasoning is split off first: tools are called by content alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from inflight.openai.reasoning import ReasoningSplitter, ReasoningTags
from inflight.openai.tools.events import Content, Event, ToolCallStarted
from inflight.openai.tools.parser import ToolParser


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model thought before its answer."""

    text: str


Piece = Reasoning | Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """Of all choices of one call."""

    make_tool_parser: Callable[[], ToolParser] | None = None
    """None: all of the content is for people."""
    calls_are_all: bool = False
    """Whether a grammar leaves no content: the beginning of a call that was cut is none, either."""
    keeps_one_call: bool = False
    """Whether calls behind the first one of a choice are dropped."""
    calls_are_a_reason: bool = True
    """Whether a choice that has ended by itself says tool_calls if it has some."""
    reasoning_tags: ReasoningTags | None = None
    """None: no text is reasoning."""
    starts_in_reasoning: bool = False
    includes_reasoning: bool = True


class ChatReader:
    """Of one choice."""

    def __init__(self, format: ChatFormat) -> None:
        self._format = format
        self._parser = format.make_tool_parser() if format.make_tool_parser is not None else None
        self._splitter = (
            ReasoningSplitter(starts_in_reasoning=format.starts_in_reasoning, tags=format.reasoning_tags)
            if format.reasoning_tags is not None
            else None
        )
        self._has_calls = False

    def feed(self, text: str) -> list[Piece]:
        """What is certain of the text by now."""
        reasoning, content = ("", text) if self._splitter is None else self._splitter.feed(text)
        return [*self._reasoning(reasoning), *self._kept(self._parse(content))]

    def finish(self) -> list[Piece]:
        """What was held, once no more text comes."""
        reasoning, content = ("", "") if self._splitter is None else self._splitter.finish()
        events = self._parse(content)
        if self._parser is not None:
            events += self._parser.finish()
        return [*self._reasoning(reasoning), *self._kept(events)]

    def finish_reason(self, reason: str) -> str:
        """`reason`: the engine's. An answer that was cut says so, whatever it calls, and one that a stop string ended
        within a call does not ask for it."""
        is_whole = self._parser is not None and not self._parser.breaks_off
        is_called = self._has_calls and is_whole and self._format.calls_are_a_reason
        return "tool_calls" if is_called and reason == "stop" else reason

    def _reasoning(self, text: str) -> list[Piece]:
        return [Reasoning(text)] if text and self._format.includes_reasoning else []

    def _parse(self, content: str) -> list[Event]:
        if self._parser is not None:
            return self._parser.feed(content)
        return [Content(content)] if content else []

    def _kept(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            self._has_calls = self._has_calls or isinstance(event, ToolCallStarted)
            drops = (
                self._format.calls_are_all
                if isinstance(event, Content)
                else self._format.keeps_one_call and event.index > 0
            )
            if not drops:
                yield event
