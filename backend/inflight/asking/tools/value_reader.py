"""Reads one value that arrives in pieces, in JSON's spelling or in Python's, and writes it as JSON.

A state machine that looks at each character once. Nothing is evaluated and no parser of Python is called: its stack can
be exhausted by a short text. Values in Python's spelling are what JSON has, too: text, numbers, True, False, None,
lists, and dictionaries with text as keys; not tuples, joined texts or arithmetic.

    VALUE   a value is next              FIRST_VALUE   the same, or the end of an empty list
    KEY     a key is next                FIRST_KEY     the same, or the end of an empty object
    COLON   what follows a key           NEXT          a comma or the container's end
    STRING, ESCAPE, SCALAR: within a text, within an escape in it, within a number or a word
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto

MAX_NESTING = 64
"""Depth of lists and objects in a value."""
MAX_SCALAR_CHARS = 512
"""Length of a number: it is written when it is whole."""

_SPACE = re.compile(r"[ \t\n\r]+")
_SCALAR = re.compile(r"[A-Za-z0-9_+.\-]+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f\"]+") for quote in "\"'"}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_PYTHON_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][+-]?[0-9]+)?", re.ASCII)
_WORDS = ("true", "false", "null")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"} | {word: word for word in _WORDS}
_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {"'": "'", '"': '\\"', "\\": "\\\\", "\n": "", "a": "\\u0007", "v": "\\u000b"} | {
    letter: "\\" + letter for letter in "bfnrt"
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "{": "}"}


class Spelling(Enum):
    JSON = auto()
    PYTHON = auto()


class Progress(Enum):
    MORE = auto()
    DONE = auto()
    BROKEN = auto()


class _State(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()
    KEY = auto()
    FIRST_KEY = auto()
    COLON = auto()
    NEXT = auto()
    STRING = auto()
    ESCAPE = auto()
    SCALAR = auto()


class ValueReader:
    """The reading of one value. After DONE or BROKEN it must not be fed again."""

    def __init__(self, spelling: Spelling = Spelling.JSON) -> None:
        self.progress = Progress.MORE
        self.unwritten = ""
        """The end of what was read that is not written yet: a number, a word or an escape that is not whole."""
        self._is_python = spelling is Spelling.PYTHON
        self._state = _State.VALUE
        self._written: list[str] = []
        self._open: list[str] = []  # brackets of the containers that the reader is in
        self._quote = ""
        self._is_key = False

    @property
    def has_begun(self) -> bool:
        """Whether a part of the value was read."""
        return self._state is not _State.VALUE or bool(self._open)

    def feed(self, text: str, start: int, end: int) -> int:
        """Read on in text[start:end]. Returns where it stopped: `end`, or behind the value if it is DONE, or at the
        character that fits no value if it is BROKEN. Only what follows a number or a word shows that it is whole, so a
        value that is one is DONE at that character, or at `finish`."""
        position = start
        while position < end and self.progress is Progress.MORE:
            if self._state is _State.STRING:
                position = self._read_string(text, position, end)
            elif self._state is _State.ESCAPE:
                position = self._read_escape(text, position)
            elif self._state is _State.SCALAR:
                position = self._read_scalar(text, position, end)
            else:
                position = self._read_structure(text, position, end)
        return position

    def finish(self) -> None:
        """No more text comes: a number or a word is whole."""
        if self.progress is Progress.MORE and self._state is _State.SCALAR:
            self._end_scalar()

    def take(self) -> str:
        """What was written since the last call, as JSON."""
        written = "".join(self._written)
        self._written.clear()
        return written

    def _read_structure(self, text: str, position: int, end: int) -> int:
        space = _SPACE.match(text, position, end)
        if space:
            self._written.append(space[0])
            return space.end()
        char, state = text[position], self._state
        if state is _State.COLON:
            return self._step(char == ":", char, _State.VALUE, position)
        if state is _State.NEXT:
            if char == ",":
                return self._step(True, char, _State.KEY if self._open[-1] == "{" else _State.VALUE, position)
            return self._close(char, position)
        if char in "\"'" and (char == '"' or self._is_python):
            self._quote, self._is_key = char, state in (_State.KEY, _State.FIRST_KEY)
            return self._step(True, '"', _State.STRING, position)
        if state in (_State.FIRST_VALUE, _State.FIRST_KEY) and char in "]}":
            return self._close(char, position)
        if state in (_State.KEY, _State.FIRST_KEY):
            return self._break(position)
        if char in "[{":
            inside = _State.FIRST_VALUE if char == "[" else _State.FIRST_KEY
            is_shallow = len(self._open) < MAX_NESTING
            self._open.append(char)
            return self._step(is_shallow, char, inside, position)
        if _SCALAR.match(char):
            self._state = _State.SCALAR
            return position
        return self._break(position)

    def _step(self, is_valid: bool, written: str, state: _State, position: int) -> int:
        if not is_valid:
            return self._break(position)
        self._written.append(written)
        self._state = state
        return position + 1

    def _close(self, char: str, position: int) -> int:
        if char != _CLOSERS[self._open[-1]]:
            return self._break(position)
        self._open.pop()
        self._written.append(char)
        self._end_value()
        return position + 1

    def _end_value(self) -> None:
        self._state = _State.NEXT
        if not self._open:
            self.progress = Progress.DONE

    def _break(self, position: int) -> int:
        self.progress = Progress.BROKEN
        return position

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _read_string(self, text: str, position: int, end: int) -> int:
        plain = _PLAIN[self._quote].match(text, position, end)
        if plain:
            self._written.append(plain[0])
            return plain.end()
        char = text[position]
        if char == self._quote:
            self._written.append('"')
            if self._is_key:
                self._state = _State.COLON
            else:
                self._end_value()
        elif char == "\\":
            self.unwritten, self._state = char, _State.ESCAPE
        elif char == '"':
            self._written.append('\\"')  # within Python's single quotes
        elif self._is_python and char == "\n":
            return self._break(position)  # there a text ends on its line
        else:
            # Models write line ends and tabs into texts as they are. JSON wants them escaped.
            self._written.append(json.dumps(char)[1:-1])
        return position + 1

    def _read_escape(self, text: str, position: int) -> int:
        char = text[position]
        if len(self.unwritten) == 1:
            return self._begin_escape(char, position)
        if char not in "0123456789abcdefABCDEF":
            return self._break(position)
        self.unwritten += char
        if len(self.unwritten) == 2 + _HEX_DIGITS[self.unwritten[1]]:
            digits = self.unwritten[2:]
            if int(digits, 16) > 0x10FFFF:
                self.unwritten = self.unwritten[:-1]
                return self._break(position)
            self._end_escape(json.dumps(chr(int(digits, 16)))[1:-1] if len(digits) == 8 else f"\\u{digits:>04}")
        return position + 1

    def _begin_escape(self, char: str, position: int) -> int:
        if char == "u" or (self._is_python and char in "xU"):
            self.unwritten += char
        elif not self._is_python:
            if char not in _ESCAPES:
                return self._break(position)
            self._end_escape("\\" + char)
        elif char in _PYTHON_ESCAPES:
            self._end_escape(_PYTHON_ESCAPES[char])
        elif char in "01234567N" or char < " ":
            return self._break(position)
        else:
            self._end_escape("\\\\" + char)  # Python keeps the backslash of what is no escape
        return position + 1

    def _end_escape(self, written: str) -> None:
        self._written.append(written)
        self.unwritten, self._state = "", _State.STRING

    # -- numbers and words ---------------------------------------------------------------------------------------------

    def _read_scalar(self, text: str, position: int, end: int) -> int:
        run = _SCALAR.match(text, position, end)
        if run is None:
            self._end_scalar()
            return position
        stop = min(run.end(), position + MAX_SCALAR_CHARS - len(self.unwritten))
        self.unwritten += text[position:stop]
        return stop if stop == run.end() else self._break(stop)

    def _end_scalar(self) -> None:
        written = _python_scalar(self.unwritten) if self._is_python else _json_scalar(self.unwritten)
        if written is None:
            self.progress = Progress.BROKEN
            return
        self._written.append(written)
        self.unwritten = ""
        self._end_value()


def _json_scalar(text: str) -> str | None:
    return text if text in _WORDS or _JSON_NUMBER.fullmatch(text) else None


def _python_scalar(text: str) -> str | None:
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        is_float = _PYTHON_FLOAT.fullmatch(text) and math.isfinite(float(text))
        return json.dumps(float(text)) if is_float else None
