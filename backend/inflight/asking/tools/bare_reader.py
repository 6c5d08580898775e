"""Reads arguments as Gemma writes them: {a:<escape>text<escape>,b:{c:[1,true]}}. What it writes is one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from inflight.asking.tools.keyword_reader import WHITE_SPACE
from inflight.asking.tools.syntax import BareArguments
from inflight.asking.tools.tag_overlap import tag_at, tag_overlap
from inflight.asking.tools.value_reader import MAX_NESTING, MAX_SCALAR_CHARS, Progress
from inflight.asking.tools.value_types import TYPES, typed

MAX_KEY_CHARS = 256
NEEDS_MORE = -1

_SPACE = re.compile(rf"[{WHITE_SPACE}]+")
_KEY = re.compile(r"[^<>\"{}\[\]:,]+")
_SCALAR = re.compile(r"[A-Za-z0-9_+.\-]+")
_CLOSERS = {"[": "]", "{": "}"}


class BareReader:
    """With the methods of a ValueReader. `feed` stops early where the text ends within what may be a tag."""

    def __init__(self, syntax: BareArguments) -> None:
        self.progress = Progress.MORE
        self.has_begun = False
        self.unwritten = ""
        """The end of what was read that is not written yet: a key, a number or a word that is not whole."""
        self._quote = syntax.quote
        self._written: list[str] = []
        self._open: list[str] = []  # brackets of the containers that the reader is in
        self._state: Callable[[str, int, int], int] = self._read_value

    def finish(self) -> None:
        """No more text comes: a number or a word is whole."""
        if self._state == self._read_scalar:
            self._written.append(typed(self.unwritten, TYPES) or "")
            self.unwritten = ""

    def take(self) -> str:
        written = "".join(self._written)
        self._written.clear()
        return written

    def feed(self, text: str, start: int, end: int) -> int:
        position = start
        while position < end and self.progress is Progress.MORE:
            keeps_space = self._state in (self._read_text, self._read_scalar)
            space = None if keeps_space else _SPACE.match(text, position, end)
            stop = space.end() if space else self._state(text, position, end)
            if stop == NEEDS_MORE:
                break
            position = stop
        return position

    def _read_value(self, text: str, position: int, end: int) -> int:
        char = text[position]
        if not self._open and char != "{":
            return self._break(position)
        if char in _CLOSERS and len(self._open) < MAX_NESTING:
            self._open.append(char)
            self.has_begun = True
            return self._write(char, self._read_first if char == "[" else self._read_first_key, position)
        tag = tag_at(text, position, end, (self._quote,))
        if tag is None:
            return NEEDS_MORE
        if tag:
            self._write('"', self._read_text, position)
            return position + len(tag)
        if not _SCALAR.match(char):
            return self._break(position)
        self._state = self._read_scalar
        return position

    def _read_first(self, text: str, position: int, end: int) -> int:
        """A list's end, or its first value."""
        if text[position] == "]":
            return self._close(text[position], position)
        return self._read_value(text, position, end)

    def _read_first_key(self, text: str, position: int, end: int) -> int:
        """An object's end, or its first key."""
        if text[position] == "}":
            return self._close(text[position], position)
        self._state = self._read_key
        return position

    def _read_key(self, text: str, position: int, end: int) -> int:
        key = _KEY.match(text, position, min(end, position + MAX_KEY_CHARS - len(self.unwritten)))
        if key:
            self.unwritten += key[0]
            return key.end()
        if text[position] != ":" or not self.unwritten.strip():
            return self._break(position)
        self._written.append(json.dumps(self.unwritten.strip(), ensure_ascii=False))
        self.unwritten = ""
        return self._write(": ", self._read_value, position)

    def _read_text(self, text: str, position: int, end: int) -> int:
        found = text.find(self._quote, position, end)
        stop = found if found >= 0 else end - tag_overlap(text[:end], self._quote, position)
        self._written.append(json.dumps(text[position:stop], ensure_ascii=False)[1:-1])
        if found < 0:
            return stop if stop > position else NEEDS_MORE
        self._written.append('"')
        self._state = self._read_next
        return stop + len(self._quote)

    def _read_scalar(self, text: str, position: int, end: int) -> int:
        run = _SCALAR.match(text, position, min(end, position + MAX_SCALAR_CHARS - len(self.unwritten)))
        if run:
            self.unwritten += run[0]
            return run.end()
        scalar = typed(self.unwritten, TYPES)
        if scalar is None:
            return self._break(position)
        self.unwritten = ""
        self._written.append(scalar)
        self._state = self._read_next
        return position

    def _read_next(self, text: str, position: int, end: int) -> int:
        """Behind a value."""
        if text[position] == ",":
            return self._write(", ", self._read_key if self._open[-1] == "{" else self._read_value, position)
        return self._close(text[position], position)

    def _close(self, char: str, position: int) -> int:
        if char != _CLOSERS[self._open[-1]]:
            return self._break(position)
        self._open.pop()
        if not self._open:
            self.progress = Progress.DONE
        return self._write(char, self._read_next, position)

    def _write(self, text: str, following: Callable[[str, int, int], int], position: int) -> int:
        self._written.append(text)
        self._state = following
        return position + 1

    def _break(self, position: int) -> int:
        self.progress = Progress.BROKEN
        return position
