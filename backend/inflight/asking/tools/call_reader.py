"""Reads one call that a model wrote as a JSON object: {"name": "f", "arguments": {…}}, or with "parameters".

The arguments may also be a JSON text that holds the object, as Granite 4 has them: they are the object nevertheless.

Name and arguments may come in either order. Until both are read, any other member shows that the object is no call;
behind them, other members are read and dropped.
"""

from __future__ import annotations

import json
from collections.abc import Container
from enum import Enum, auto

from inflight.asking.tools.quoted_reader import QuotedReader
from inflight.asking.tools.value_reader import Progress, ValueReader

WHITE_SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")
_HARMLESS = ("type", "id")
"""Members that models write before the name."""


class _State(Enum):
    OPEN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    NEXT = auto()


class CallReader:
    """The reading of one object. After DONE or BROKEN it must not be fed again."""

    def __init__(self, names: Container[str]) -> None:
        """`names`: of the tools that may be called; an object with another name is BROKEN at the name's end."""
        self.progress = Progress.MORE
        self.name = ""
        """Of the tool, once it is known."""
        self.has_arguments = False
        """Whether the arguments are read to their end."""
        self.own_id = ""
        """That the model gave the call: none that is kept."""
        self._names = names
        self._state = _State.OPEN
        self._key = ""
        self._reader: ValueReader | QuotedReader = ValueReader()
        self._arguments: list[str] = []
        self._began_arguments = False

    @property
    def is_complete(self) -> bool:
        """Whether name and arguments are known to their end. What else the object holds is read and dropped."""
        return bool(self.name) and self.has_arguments

    @property
    def is_started(self) -> bool:
        """Whether it is a call for certain: it has a name, and its arguments began or are left out."""
        return bool(self.name) and (self._began_arguments or self.progress is Progress.DONE)

    @property
    def unwritten(self) -> str:
        """The end of the arguments that was read and cannot be taken yet."""
        return self._reader.unwritten if self._is_in_arguments else ""

    def take(self) -> str:
        """The arguments read since the last call, as JSON. Only to be called once it is started."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def finish(self) -> str:
        """No more text comes. Returns the end of the arguments, as far as they were written."""
        if isinstance(self._reader, QuotedReader):
            return self._reader.cut if self._is_in_arguments else ""
        return self.unwritten

    def feed(self, text: str, start: int, end: int) -> int:
        """Read on in text[start:end]. Returns where it stopped: `end`, or behind the object if it is DONE, or at the
        character that fits no call if it is BROKEN. It also stops where a call is started."""
        position, was_started = start, self.is_started
        while position < end and self.progress is Progress.MORE and self.is_started == was_started:
            if self._state in (_State.IN_KEY, _State.IN_VALUE):
                position = self._read_within(text, position, end)
            elif text[position] in WHITE_SPACE:
                position += 1
            else:
                position = self._read_structure(text[position], position)
        return position

    def _read_structure(self, char: str, position: int) -> int:
        """Returns `position` where a key or a value begins, or if `char` fits nothing; otherwise behind it."""
        state = self._state
        if state is _State.OPEN and char == "{":
            self._state = _State.FIRST_KEY
        elif state in (_State.KEY, _State.FIRST_KEY) and char == '"':
            self._reader, self._state = ValueReader(), _State.IN_KEY
            return position
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state is _State.VALUE and self._may_begin(char):
            self._state = _State.IN_VALUE
            is_quoted = self._is_in_arguments and char == '"'
            self._reader = QuotedReader() if is_quoted else ValueReader()
            self._began_arguments |= self._is_in_arguments and not is_quoted
            return position
        elif state is _State.NEXT and char == ",":
            self._state = _State.KEY
        elif state is _State.NEXT and char == "}" and self.name:
            self.progress = Progress.DONE
            if not self._began_arguments:
                self._arguments.append("{}")
        else:
            self.progress = Progress.BROKEN
            return position
        return position + 1

    def _may_begin(self, char: str) -> bool:
        if self.is_complete:
            return True
        if self._key in _ARGUMENTS:
            return char in '{"' and not self._began_arguments
        return char == '"' if self._key == "name" else True

    @property
    def _is_in_arguments(self) -> bool:
        return self._state is _State.IN_VALUE and self._key in _ARGUMENTS and not self.has_arguments

    def _read_within(self, text: str, position: int, end: int) -> int:
        position = self._reader.feed(text, position, end)
        if self._is_in_arguments:
            self._began_arguments = self._began_arguments or self._reader.has_begun
            self._arguments.append(self._reader.take())
        elif self.is_complete:
            self._reader.take()
        if self._reader.progress is Progress.BROKEN:
            self.progress = Progress.BROKEN
        elif self._reader.progress is Progress.DONE:
            self._end_key() if self._state is _State.IN_KEY else self._end_value()
        return position

    def _end_key(self) -> None:
        self._state = _State.COLON
        if self.is_complete:
            return
        self._key = json.loads(self._reader.take())
        is_repeated = (self._key == "name" and self.name) or (self._key in _ARGUMENTS and self._began_arguments)
        if is_repeated or self._key not in ("name", *_ARGUMENTS, *_HARMLESS):
            self.progress = Progress.BROKEN

    def _end_value(self) -> None:
        self._state = _State.NEXT
        if self.is_complete:
            return
        if self._key in _ARGUMENTS:
            self.has_arguments = True
        elif self._key == "name":
            name = json.loads(self._reader.take())
            if name in self._names:
                self.name = name
            else:
                self.progress = Progress.BROKEN
