"""How the text of a chat's choices is read: what of it is reasoning, what is content, and what calls tools.

Reasoning is split off first: tools are called by content alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inflight.asking.reasoning import Splitter
from inflight.asking.tools.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.parser import ToolParser

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
    make_splitter: Callable[[], Splitter] | None = None
    """None: no text is reasoning."""
    includes_reasoning: bool = True
    check_call: Callable[[str, str], None] | None = None
    """Told of each call that the model has finished: its tool's name, its arguments as JSON text."""


class ChatReader:
    """Of one choice."""

    def __init__(self, format: ChatFormat) -> None:
        self._format = format
        self._parser = format.make_tool_parser() if format.make_tool_parser is not None else None
        self._splitter = format.make_splitter() if format.make_splitter is not None else None
        self._has_calls = False
        self._calls: list[tuple[str, list[str]]] = []
        """Names and arguments, in pieces; only if someone checks them."""

    def feed(self, text: str) -> list[Piece]:
        """What is certain of the text by now."""
        if self._splitter is not None:
            return self._pieces(self._splitter.feed(text))
        return self._pieces([Content(text)]) if text else []

    def finish(self) -> list[Piece]:
        """What was held, once no more text comes."""
        pieces = [] if self._splitter is None else self._pieces(self._splitter.finish())
        if self._parser is not None:
            pieces += self._kept(self._parser.finish())
            self._check_calls(is_last_whole=not self._parser.breaks_off)
        return pieces

    def finish_reason(self, reason: str) -> str:
        """`reason`: the engine's. An answer that was cut says so, whatever it calls, and one that a stop string ended
        within a call does not ask for it."""
        is_whole = self._parser is not None and not self._parser.breaks_off
        is_called = self._has_calls and is_whole and self._format.calls_are_a_reason
        return "tool_calls" if is_called and reason == "stop" else reason

    def _pieces(self, parts: list[Reasoning | Content]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, Content):
                pieces += self._kept([part] if self._parser is None else self._parser.feed(part.text))
            elif self._format.includes_reasoning:
                pieces.append(part)
        return pieces

    def _kept(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            self._has_calls = self._has_calls or isinstance(event, ToolCallStarted)
            drops = (
                self._format.calls_are_all
                if isinstance(event, Content)
                else self._format.keeps_one_call and event.index > 0
            )
            if not drops:
                if self._format.check_call is not None:
                    self._note(event)
                yield event

    def _note(self, event: Event) -> None:
        if isinstance(event, ToolCallStarted):
            self._calls.append((event.name, []))
        elif isinstance(event, ToolCallArguments):
            self._calls[-1][1].append(event.text)

    def _check_calls(self, *, is_last_whole: bool) -> None:
        whole = self._calls if is_last_whole else self._calls[:-1]
        for name, arguments in whole:
            if self._format.check_call is not None:
                self._format.check_call(name, "".join(arguments))
