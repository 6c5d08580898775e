"""Reads an object that a model wrote as a JSON text: "{\\"a\\": 1}". What it writes is the object."""

from __future__ import annotations

import json
import re

from inflight.asking.tools.value_reader import Progress, ValueReader

WHITE_SPACE = " \t\n\r"
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""The first half of a character beyond U+FFFF, whose second half is not read yet."""


class QuotedReader:
    """With the methods of a ValueReader. An object with something else in its text is BROKEN."""

    def __init__(self) -> None:
        self.progress = Progress.MORE
        self._text = ValueReader()
        self._object = ValueReader()
        self._half = ""
        self._raw = ""
        self._is_open = False  # the quotation mark was read

    @property
    def has_begun(self) -> bool:
        """Whether a part of the object was read."""
        return self._object.has_begun

    @property
    def unwritten(self) -> str:
        """What was read and not written, as it stands in the text."""
        return self._object.unwritten + self._raw

    @property
    def cut(self) -> str:
        """The end of the object, if no more text comes."""
        return self._object.unwritten

    def feed(self, text: str, start: int, end: int) -> int:
        position = start
        while position < end and self.progress is Progress.MORE:
            # One at a time, so that what breaks the object is known to the character.
            stop = self._text.feed(text, position, position + 1)
            self._raw += text[position:stop]
            position = stop
            self._read(self._text.take())
        return position

    def take(self) -> str:
        return self._object.take()

    def _read(self, written: str) -> None:
        """`written`: what a character added to the text, as JSON."""
        if self._text.progress is Progress.BROKEN:
            self.progress = Progress.BROKEN
        elif self._text.progress is Progress.DONE:
            self.progress = self._object.progress if self._object.progress is Progress.DONE else Progress.BROKEN
        elif not self._is_open:
            self._is_open, self._raw = True, ""
        elif written and not _HALF.search(self._half + written):
            self._decode(json.loads(f'"{self._half}{written}"'))
            self._half = ""
        else:
            self._half += written

    def _decode(self, content: str) -> None:
        """`content`: of the text, the next character; two only where one half of a character stands alone."""
        is_space = content in WHITE_SPACE
        if self._object.progress is Progress.DONE:
            fits = is_space
        elif not self._object.has_begun:
            fits = is_space or content == "{"
            if content == "{":
                self._object.feed(content, 0, 1)
        else:
            self._object.feed(content, 0, len(content))
            fits = self._object.progress is not Progress.BROKEN
        if fits:
            self._raw = ""
        else:
            self.progress = Progress.BROKEN
