"""Reads arguments that a model wrote as Python: (a=1, b="x"). What it writes is one JSON object.

They are literals, given by keyword, and read by `value_reader`, so that nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from inflight.asking.tools.value_reader import Progress, Spelling, ValueReader

WHITE_SPACE = " \t\n\r"
MAX_KEYWORD_CHARS = 256

_SPACE = re.compile(rf"[{WHITE_SPACE}]+")
_WHOLE_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)
_KEYWORD = re.compile(r"\w+")


class KeywordReader:
    """With the methods of a ValueReader. They have begun once the first keyword and the sign of equality are read."""

    def __init__(self) -> None:
        self.progress = Progress.MORE
        self.has_begun = False
        self._raw: list[str] = []  # read since something was written
        self._word = ""
        self._keywords: set[str] = set()
        self._written: list[str] = []
        self._value: ValueReader | None = None  # of the argument that is read
        self._state: Callable[[str, int], int] = self._read_open

    @property
    def unwritten(self) -> str:
        return "".join(self._raw) + (self._value.unwritten if self._value else "")

    def finish(self) -> None:
        """No more text comes. Of what Python writes in another way than JSON, no part is written."""
        if self._value and _WHOLE_NUMBER.fullmatch(self._value.unwritten):
            self._written.append(self._value.unwritten)

    def take(self) -> str:
        written = "".join(self._written)
        self._written.clear()
        return written

    def feed(self, text: str, start: int, end: int) -> int:
        position, had_begun = start, self.has_begun
        while position < end and self.progress is Progress.MORE and self.has_begun == had_begun:
            if self._value:
                position = self._read_value(self._value, text, position, end)
            elif text[position] in WHITE_SPACE:
                position = self._pass_space(text, position, end)
            else:
                position = self._state(text[:end], position)
        return position

    def _read_open(self, text: str, position: int) -> int:
        return self._pass(position, "(", self._read_keyword) if text[position] == "(" else self._break(position)

    def _read_keyword(self, text: str, position: int) -> int:
        char = text[position]
        keyword = _KEYWORD.match(text, position, position + MAX_KEYWORD_CHARS - len(self._word))
        if keyword:
            self._word += keyword[0]
            self._raw.append(keyword[0])
            return keyword.end()
        if char == "=" and self._word.isidentifier() and self._word not in self._keywords:
            self._write(("{" if not self._keywords else ", ") + json.dumps(self._word, ensure_ascii=False) + ": ")
            self._keywords.add(self._word)
            self._word, self._state = "", self._read_begin
            return position + 1
        if char == ")" and not self._word:
            return self._close(position)  # no arguments, or a comma behind the last one
        return self._break(position)

    def _read_begin(self, text: str, position: int) -> int:
        """Behind the sign of equality."""
        self._value = ValueReader(Spelling.PYTHON)
        return position

    def _read_value(self, value: ValueReader, text: str, position: int, end: int) -> int:
        position = value.feed(text, position, end)
        self._written.append(value.take())
        if value.progress is Progress.DONE:
            self._value, self._state = None, self._read_comma
        elif value.progress is Progress.BROKEN:
            self.progress = Progress.BROKEN
        return position

    def _read_comma(self, text: str, position: int) -> int:
        if text[position] == ",":
            return self._pass(position, ",", self._read_keyword)
        return self._close(position) if text[position] == ")" else self._break(position)

    def _close(self, position: int) -> int:
        self._write("}" if self._keywords else "{}")
        self.progress = Progress.DONE
        return position + 1

    def _pass_space(self, text: str, position: int, end: int) -> int:
        space = _SPACE.match(text, position, end)
        if space and self._state != self._read_begin:
            self._raw.append(space[0])
        return space.end() if space else position

    def _pass(self, position: int, char: str, following: Callable[[str, int], int]) -> int:
        self._raw.append(char)
        self._state = following
        return position + 1

    def _write(self, text: str) -> None:
        self._written.append(text)
        self._raw.clear()
        self.has_begun = True

    def _break(self, position: int) -> int:
        self.progress = Progress.BROKEN
        return position
