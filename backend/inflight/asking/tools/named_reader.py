"""Reads one call that begins with the name of its tool, and the arguments behind it in any of the ways of writing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from inflight.asking.tools.bare_reader import BareReader
from inflight.asking.tools.call_reader import WHITE_SPACE
from inflight.asking.tools.keyword_reader import KeywordReader
from inflight.asking.tools.syntax import BareArguments, JsonArguments, NamedCall, PythonArguments, pieces_of
from inflight.asking.tools.tag_overlap import tag_at
from inflight.asking.tools.tagged_reader import TaggedReader
from inflight.asking.tools.tool import MAX_NAME_CHARS, Tool
from inflight.asking.tools.value_reader import Progress, ValueReader

NEEDS_MORE = -1

_WORD = re.compile(r"[a-zA-Z0-9_-]+")

ArgumentsReader = ValueReader | KeywordReader | TaggedReader | BareReader


class NamedReader:
    """With the methods of a CallReader. `feed` stops early where the text ends within what may be a tag."""

    def __init__(self, call: NamedCall, tools: Mapping[str, Tool]) -> None:
        self.progress = Progress.MORE
        self.name = ""
        self.own_id = ""
        """That the model gave the call, if it is kept."""
        self.is_complete = False
        self._syntax = call
        self._tools = tools
        self._word = ""
        self._pieces = list(pieces_of(call.before_name))
        self._state: Callable[[str, int, int], int] = self._read_before_name
        self._arguments: ArgumentsReader = ValueReader()

    @property
    def is_started(self) -> bool:
        return self._arguments.has_begun

    @property
    def unwritten(self) -> str:
        return "" if self.is_complete else self._arguments.unwritten

    def take(self) -> str:
        return self._arguments.take()

    def finish(self) -> str:
        """No more text comes. Returns the end of the arguments, as far as they were written."""
        if self.is_complete:
            return ""
        self._arguments.finish()
        return self._arguments.take() + (self._arguments.unwritten if isinstance(self._arguments, ValueReader) else "")

    def feed(self, text: str, start: int, end: int) -> int:
        position, was_started = start, self.is_started
        while position < end and self.progress is Progress.MORE and self.is_started == was_started:
            stop = self._state(text, position, end)
            if stop == NEEDS_MORE:
                break
            position = stop
        return position

    # -- states --------------------------------------------------------------------------------------------------------

    def _read_before_name(self, text: str, position: int, end: int) -> int:
        if self._pieces:
            return self._read_piece(text, position, end)
        self._state = self._read_name
        return position

    def _read_piece(self, text: str, position: int, end: int) -> int:
        """The next of what must stand here."""
        if text[position] in WHITE_SPACE:
            return position + 1
        tag = tag_at(text, position, end, self._pieces[:1])
        if tag is None:
            return NEEDS_MORE
        if not tag:
            self.progress = Progress.BROKEN
            return position
        self._pieces.pop(0)
        return position + len(tag)

    def _read_word(self, text: str, position: int, end: int) -> int:
        """Returns `position` at the word's end."""
        if text[position] in WHITE_SPACE and not self._word:
            return position + 1
        word = _WORD.match(text, position, min(end, position + MAX_NAME_CHARS - len(self._word)))
        self._word += word[0] if word else ""
        return word.end() if word else position

    def _read_name(self, text: str, position: int, end: int) -> int:
        stop = self._read_word(text, position, end)
        if stop == position:
            self.name, self._word = self._word if self._word in self._tools else "", ""
            if self.name:
                self._state = self._read_behind_name
            else:
                self.progress = Progress.BROKEN
        return stop

    def _read_behind_name(self, text: str, position: int, end: int) -> int:
        """At an id, or at what stands before the arguments."""
        call = self._syntax
        pieces = pieces_of(call.behind_name)
        if text[position] in WHITE_SPACE:
            return position + 1
        tag = tag_at(text, position, end, filter(None, (*pieces[:1], call.before_id)))
        if tag is None:
            return NEEDS_MORE
        if tag and tag == call.before_id:
            self._state = self._read_id
            return position + len(tag)
        if not tag and pieces and not call.may_omit_behind_name:
            self.progress = Progress.BROKEN
            return position
        self._pieces = list(pieces[1:]) if tag else []
        self._state = self._read_before_arguments
        return position + len(tag)

    def _read_id(self, text: str, position: int, end: int) -> int:
        stop = self._read_word(text, position, end)
        if stop == position:
            self.own_id = self._syntax.kept_id.format(name=self.name, id=self._word)
            self._pieces = list(pieces_of(self._syntax.behind_name))
            self._state = self._read_before_arguments
        return stop

    def _read_before_arguments(self, text: str, position: int, end: int) -> int:
        if self._pieces or text[position] in WHITE_SPACE:
            return self._read_piece(text, position, end) if self._pieces else position + 1
        kind = self._syntax.arguments
        self._state = self._read_arguments
        if isinstance(kind, JsonArguments):
            if text[position] != "{":
                self.progress = Progress.BROKEN
        elif isinstance(kind, PythonArguments):
            self._arguments = KeywordReader()
        elif isinstance(kind, BareArguments):
            self._arguments = BareReader(kind)
        else:
            (closing, *_) = (*pieces_of(self._syntax.behind_arguments), "")
            self._arguments = TaggedReader(kind, closing, self._tools[self.name].schema)
        return position

    def _read_arguments(self, text: str, position: int, end: int) -> int:
        reader = self._arguments
        stop = reader.feed(text, position, end)
        if reader.progress is Progress.DONE:
            self.is_complete = True
            self._pieces = list(pieces_of(self._syntax.behind_arguments))
            if isinstance(reader, TaggedReader):
                self._pieces.pop(0)
            self._state = self._read_behind_arguments
            self._end()
        elif reader.progress is Progress.BROKEN:
            self.progress = Progress.BROKEN
        elif stop == position:
            return NEEDS_MORE
        return stop

    def _read_behind_arguments(self, text: str, position: int, end: int) -> int:
        stop = self._read_piece(text, position, end)
        self._end()
        return stop

    def _end(self) -> None:
        if not self._pieces and self.progress is Progress.MORE:
            self.progress = Progress.DONE
