"""Finds calls in text that comes in pieces, as the description of a syntax has them: a state machine.

A state is a method that reads on from a position and returns the next one, or NEEDS_MORE if the text ends within what
may be a tag. It sees each character once, but for the beginning of a tag: the work is linear in the text.

    leading   white space at the start of the text, before what may be a call without a tag
    text      content; a tag begins calls
    section   behind a tag: a list, or a call
    call      a call
    list      behind a call in a list: white space, a comma and the next call, or the list's end
    between   behind a call: white space, closing tags, the next call, or content again

What may turn out to be a call is held until it is one for certain: then it becomes events, otherwise content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from inflight.asking.tools.call_reader import WHITE_SPACE, CallReader
from inflight.asking.tools.events import Content, Event, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.named_reader import NamedReader
from inflight.asking.tools.syntax import CallForm, CallSyntax, NamedCall, pieces_of
from inflight.asking.tools.tag_overlap import tag_at, tag_overlap
from inflight.asking.tools.tool import Tool
from inflight.asking.tools.value_reader import Progress

MAX_HELD_CHARS = 65536
"""Text in which no call has begun for certain that is held before it is given up as content."""
NEEDS_MORE = -1
CONTENT = -1
"""Stands where the index of a call would."""

_SPACE = re.compile(rf"[{WHITE_SPACE}]+")


class CallMachine:
    """One choice's text. Calls of tools that were not offered are content."""

    def __init__(
        self, syntax: CallSyntax, tools: list[Tool], new_id: Callable[[], str], *, at_start_only: bool = False
    ) -> None:
        """`at_start_only`: whether calls are the whole text, so that a tag within other text is a part of that."""
        self._syntax = syntax
        self._tools = {tool.name: tool for tool in tools}
        self._new_id = new_id
        self._begins = syntax.begins
        self._ends = pieces_of(syntax.end)
        self._starts = () if at_start_only else (*syntax.begins, *syntax.within_text)
        self._start = re.compile("|".join(map(re.escape, self._starts))) if self._starts else None
        self._state: Callable[[str, int], int] = self._read_leading
        self._unread = ""  # the beginning of a tag, perhaps
        self._held: list[str] = []
        self._num_held = 0  # characters
        self._events: list[Event] = []
        self._texts: list[str] = []  # of one event that is not made yet: of the call `_owner`, or content
        self._owner = CONTENT
        self._num_calls = 0
        self._form = syntax.forms[0]
        self._in_section = False  # calls may follow without another tag
        self._call: CallReader | NamedReader = CallReader(self._tools)
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
            self._add_arguments(self._call.finish())
        elif not self._num_calls or not self._is_gap(held):
            self._add_content(held)
        return self._take_events()

    @property
    def breaks_off(self) -> bool:
        """Whether the text, as far as it came, ends within the arguments of a call."""
        return self._is_calling and not self._call.is_complete

    # -- states --------------------------------------------------------------------------------------------------------

    def _read_leading(self, text: str, position: int) -> int:
        char = text[position]
        if char in WHITE_SPACE:
            return self._hold_gap(text, position)
        if self._syntax.is_bare and any(char == ("[" if form.in_list else "{") for form in self._syntax.forms):
            self._state = self._read_section
            return position
        return self._read_tag(text, position, ())

    def _read_between(self, text: str, position: int) -> int:
        char = text[position]
        if char in WHITE_SPACE or (char in self._separator and self._in_section):
            return self._hold_gap(text, position)
        tag = tag_at(text, position, len(text), (*self._begins, *self._ends))
        if tag == "" and self._in_section and self._may_begin(char):
            self._begin_call()
            return position
        return self._read_tag(text, position, self._ends)

    def _read_tag(self, text: str, position: int, ends: tuple[str, ...]) -> int:
        """Where there is neither a tag that begins calls nor one of `ends`, content follows."""
        tag = tag_at(text, position, len(text), (*self._begins, *ends))
        if tag is None:
            return NEEDS_MORE
        if not tag:
            self._give_up()
        elif tag in self._begins:
            self._begin_section(tag)
        else:
            self._drop_held()
            self._in_section = False
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
        found = self._start.search(text, position) if self._start else None
        if found:
            self._add_content(text[position : found.start()])
            if found[0] in self._begins:
                self._begin_section(found[0])
                return found.end()
            self._form, self._in_section = self._syntax.forms[0], self._syntax.forms[0].between is not None
            self._begin_call()
            return found.start()
        stop = len(text) - max((tag_overlap(text, tag, position) for tag in self._starts), default=0)
        self._add_content(text[position:stop])
        return stop if stop > position else NEEDS_MORE

    def _read_section(self, text: str, position: int) -> int:
        """Where calls begin."""
        char = text[position]
        if char in WHITE_SPACE:
            return self._hold_gap(text, position)
        form = self._form_at(char)
        if form is None:
            self._give_up()
            return position
        self._form, self._in_section = form, form.between is not None and not form.in_list
        self._begin_call()
        if not form.in_list:
            return position
        self._hold(char)
        return position + 1

    def _read_call(self, text: str, position: int) -> int:
        call, was_started = self._call, self._call.is_started
        end = len(text) if was_started else min(len(text), position + MAX_HELD_CHARS - self._num_held)
        stop = call.feed(text, position, end)
        if not call.is_started:
            self._hold(text[position:stop])
        else:
            if not was_started:
                self._start_call(call.name, call.own_id)
            self._add_arguments(call.take())
        if call.progress is Progress.DONE or (call.progress is Progress.BROKEN and call.is_complete):
            self._end_call()
        elif call.progress is Progress.BROKEN or self._num_held >= MAX_HELD_CHARS:
            if call.is_started:
                self._add_content(call.unwritten)
            self._give_up()
        elif stop == position and call.is_started == was_started:
            if end == len(text):
                return NEEDS_MORE
            self._give_up()
        return stop

    def _read_list(self, text: str, position: int) -> int:
        """Behind a call in a list."""
        char = text[position]
        if char in WHITE_SPACE:
            return self._hold_gap(text, position)
        if char == ",":
            self._hold(char)
            self._begin_call()
        elif char == "]":
            self._drop_held()
            self._state = self._read_between
        else:
            self._give_up()
            return position
        return position + 1

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _form_at(self, char: str) -> CallForm | None:
        """Of calls that begin with this character."""
        in_list = [form for form in self._syntax.forms if form.in_list]
        others = [form for form in self._syntax.forms if not form.in_list]
        if char == "[" and in_list:
            return in_list[0]
        return others[0] if others else None

    @property
    def _separator(self) -> str:
        """What may stand between calls that follow one tag, besides white space."""
        return (self._form.between or "").strip()

    def _may_begin(self, char: str) -> bool:
        """Whether a call that follows without another tag may begin so."""
        call = self._form.call
        if not isinstance(call, NamedCall):
            return char == "{"
        return call.before_name.startswith(char) if call.before_name else char.isalnum() or char in "_-"

    def _begin_section(self, tag: str) -> None:
        """Behind a tag that begins calls."""
        self._hold(tag)
        self._state = self._read_section
        if tag.endswith("["):
            self._form, self._in_section = self._syntax.forms[0], False
            self._begin_call()

    def _begin_call(self) -> None:
        """A call is next."""
        call = self._form.call
        self._call = NamedReader(call, self._tools) if isinstance(call, NamedCall) else CallReader(self._tools)
        self._state = self._read_call

    def _end_call(self) -> None:
        self._is_calling = False
        self._state = self._read_list if self._form.in_list else self._read_between

    def _is_gap(self, held: str) -> bool:
        """Whether what is left at the end is nothing but what stands behind calls, or begins to."""
        rest = held.strip(WHITE_SPACE + "," + self._separator)
        return not rest or any(tag.startswith(rest) for tag in self._ends)

    def _give_up(self) -> None:
        """What is held is no call, and what follows is content."""
        self._add_content("".join(self._held))
        self._drop_held()
        self._is_calling = False
        self._state = self._read_text

    # -- what is held, and what is certain -----------------------------------------------------------------------------

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _drop_held(self) -> None:
        self._held.clear()
        self._num_held = 0

    def _start_call(self, name: str, own_id: str = "") -> None:
        self._drop_held()
        self._join_texts()
        self._events.append(ToolCallStarted(self._num_calls, own_id or self._new_id(), name))
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

    def _take_events(self) -> list[Event]:
        self._join_texts()
        taken, self._events = self._events, []
        return taken


class ForcedMachine(CallMachine):
    """Of text that follows the grammar of forced calls: a call that it breaks off before its arguments is one, too."""

    def finish(self) -> list[Event]:
        name = self._name_of_last()
        if name:
            self._start_call(name)
        return super().finish()

    def _name_of_last(self) -> str:
        """Of the call that the text has begun and not started; "" if it is not known."""
        if self._is_calling or self._state == self._read_text or not (self._num_held or self._unread):
            return ""
        if self._state == self._read_call and self._call.name:
            return self._call.name
        (first, *others) = self._tools
        return "" if others or self._num_calls else first
