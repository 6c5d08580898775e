"""What the parsers of all families share: a state machine over text that comes in pieces.

A state is a method that reads on from a position and returns the next one, or NEEDS_MORE if the text ends within what
may be a tag. It sees each character once, but for the beginning of a tag: the work is linear in the text.

    leading   white space at the start of the text, before what may be a call without a tag
    text      content; a tag begins calls
    call      a JSON object that is a call
    list      behind a call in a list: white space, a comma and the next call, or the list's end
    between   behind a call: white space, closing tags, the next call, or content again

What may turn out to be a call is held until it is one for certain: then it becomes events, otherwise content.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from inflight.openai.tools.call_reader import WHITE_SPACE, CallReader
from inflight.openai.tools.events import Content, Event, ToolCallArguments, ToolCallStarted
from inflight.openai.tools.tag_overlap import tag_overlap
from inflight.openai.tools.tool import Tool
from inflight.openai.tools.value_reader import Progress, ValueReader

MAX_HELD_CHARS = 65536
"""Text in which no call has begun for certain that is held before it is given up as content."""
NEEDS_MORE = -1
CONTENT = -1
"""Stands where the index of a call would."""

_SPACE = re.compile(rf"[{WHITE_SPACE}]+")


class CallMachine(ABC):
    """One choice's text. Calls of tools that were not offered are content."""

    tag: ClassVar[str] = ""
    """Begins calls, anywhere in the text."""
    closing_tag: ClassVar[str] = ""
    """May stand behind a call, and is dropped there."""
    inner_tags: ClassVar[tuple[str, ...]] = ()
    """Stand within a call."""
    opening: ClassVar[str] = ""
    """Character that begins calls without a tag, at the start of the text alone."""
    separator: ClassVar[str] = ""
    """Character that may stand between calls without tags, which then follow each other."""

    def __init__(self, tools: list[Tool], new_id: Callable[[], str], *, at_start_only: bool = False) -> None:
        """`at_start_only`: whether calls are the whole text, so that a tag within other text is a part of that."""
        self._names = frozenset(tool.name for tool in tools)
        self._new_id = new_id
        self._tag_in_text = "" if at_start_only else self.tag
        self._state: Callable[[str, int], int] = self._read_leading
        self._unread = ""  # the beginning of a tag, perhaps
        self._held: list[str] = []
        self._num_held = 0  # characters
        self._events: list[Event] = []
        self._texts: list[str] = []  # of one event that is not made yet: of the call `_owner`, or content
        self._owner = CONTENT
        self._num_calls = 0
        self._call = CallReader(self._names)
        self._value = ValueReader()
        self._is_calling = False  # within the arguments of a call

    def feed(self, text: str) -> list[Event]:
        """The text's next piece. Returns what is certain by now."""
        text = self._unread + text
        position = 0
        while position < len(text):
            stop = self._state(text, position)
            if stop == NEEDS_MORE:
                break
            position = stop
        self._unread = text[position:]
        return self._take_events()

    def finish(self) -> list[Event]:
        """No more text comes. A call that it breaks off stays as it is: nobody knows how it would have ended."""
        held = "".join(self._held) + self._unread
        self._drop_held()
        if self._is_calling:
            self._finish_arguments()
        elif not self._num_calls or held.strip(WHITE_SPACE + "," + self.separator):
            self._add_content(held)
        return self._take_events()

    @property
    def breaks_off(self) -> bool:
        """Whether the text, as far as it came, ends within the arguments of a call."""
        return self._is_calling and not (self._state == self._read_call and self._call.is_complete)

    # -- states --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin_calls(self) -> None:
        """A tag was read, or `opening` is next: choose the state that reads calls."""

    def _read_leading(self, text: str, position: int) -> int:
        return self._read_gap(text, position, starts=self.opening)

    def _read_between(self, text: str, position: int) -> int:
        return self._read_gap(text, position, starts=self.opening if self.separator else "")

    def _read_gap(self, text: str, position: int, *, starts: str) -> int:
        if text[position] in WHITE_SPACE or (text[position] == self.separator and self._num_calls):
            return self._hold_gap(text, position)
        if text[position] == starts:
            self._begin_calls()
            return position
        tag = self._tag_at(text, position, self.tag, self.closing_tag if self._num_calls else "")
        if tag is None:
            return NEEDS_MORE
        if not tag:
            self._give_up()
        elif tag == self.tag:
            self._hold(tag)
            self._begin_calls()
        else:
            self._drop_held()
        return position + len(tag)

    def _hold_gap(self, text: str, position: int) -> int:
        """Hold white space, or the one character here that is none."""
        space = _SPACE.match(text, position, position + MAX_HELD_CHARS - self._num_held)
        stop = space.end() if space else position + 1
        self._hold(text[position:stop])
        if self._num_held >= MAX_HELD_CHARS:
            self._give_up()
        return stop

    def _read_text(self, text: str, position: int) -> int:
        tag = self._tag_in_text
        found = text.find(tag, position) if tag else -1
        if found >= 0:
            self._add_content(text[position:found])
            self._hold(tag)
            self._begin_calls()
            return found + len(tag)
        stop = len(text) - tag_overlap(text, tag, position)
        self._add_content(text[position:stop])
        return stop if stop > position else NEEDS_MORE

    def _read_call(self, text: str, position: int) -> int:
        call, was_started = self._call, self._call.is_started
        end = len(text) if was_started else min(len(text), position + MAX_HELD_CHARS - self._num_held)
        stop = call.feed(text, position, end)
        if not call.is_started:
            self._hold(text[position:stop])
        else:
            if not was_started:
                self._start_call(call.name)
            self._add_arguments(call.take())
        if call.progress is Progress.DONE or (call.progress is Progress.BROKEN and call.is_complete):
            self._end_call()
        elif call.progress is Progress.BROKEN or self._num_held >= MAX_HELD_CHARS:
            if call.is_started:
                self._add_content(call.unwritten)
            self._give_up()
        return stop

    def _begin_call(self) -> None:
        """A call as a JSON object is next."""
        self._call = CallReader(self._names)
        self._state = self._read_call

    def _read_list(self, text: str, position: int) -> int:
        """Behind a call in a list."""
        char = text[position]
        if char in WHITE_SPACE:
            return self._hold_gap(text, position)
        if char == ",":
            self._hold(char)
            self._begin_listed_call()
        elif char == "]":
            self._drop_held()
            self._state = self._read_between
        else:
            self._give_up()
            return position
        return position + 1

    def _begin_listed_call(self) -> None:
        """A call in a list is next."""
        self._begin_call()

    def _read_value(self, text: str, position: int) -> int:
        """Arguments, or one of them, of a call that was started."""
        stop = self._value.feed(text, position, len(text))
        self._add_arguments(self._value.take())
        if self._value.progress is Progress.DONE:
            self._end_value()
        elif self._value.progress is Progress.BROKEN:
            self._add_content(self._value.unwritten)
            self._give_up()
        return stop

    def _end_value(self) -> None:
        """What `_read_value` reads has ended."""
        self._end_call()

    def _end_call(self) -> None:
        self._is_calling = False
        self._state = self._read_between

    def _give_up(self) -> None:
        """What is held is no call, and what follows is content."""
        self._add_content("".join(self._held))
        self._drop_held()
        self._is_calling = False
        self._state = self._read_text

    # -- what is held, and what is certain -----------------------------------------------------------------------------

    def _tag_at(self, text: str, position: int, *tags: str) -> str | None:
        """The tag that stands here, "" if none does, None if the text ends within what may be one."""
        for tag in tags:
            if tag and text.startswith(tag, position):
                return tag
        rest = text[position : position + max(map(len, tags))]
        return None if rest and any(tag.startswith(rest) for tag in tags) else ""

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _drop_held(self) -> None:
        self._held.clear()
        self._num_held = 0

    def _start_call(self, name: str) -> None:
        self._drop_held()
        self._join_texts()
        self._events.append(ToolCallStarted(self._num_calls, self._new_id(), name))
        self._num_calls += 1
        self._is_calling = True

    def _add_arguments(self, text: str) -> None:
        self._add(self._num_calls - 1, text)

    def _add_content(self, text: str) -> None:
        self._add(CONTENT, text)

    def _add(self, owner: int, text: str) -> None:
        if text:
            if owner != self._owner:
                self._join_texts()
            self._owner = owner
            self._texts.append(text)

    def _join_texts(self) -> None:
        """Neighbours of the same kind are one event."""
        if self._texts:
            text = "".join(self._texts)
            self._texts.clear()
            self._events.append(Content(text) if self._owner == CONTENT else ToolCallArguments(self._owner, text))

    def _finish_arguments(self) -> None:
        if self._state == self._read_call:
            self._add_arguments(self._call.unwritten)
        elif self._state == self._read_value:
            self._value.finish()
            self._add_arguments(self._value.take() + self._value.unwritten)

    def _take_events(self) -> list[Event]:
        self._join_texts()
        taken, self._events = self._events, []
        return taken
