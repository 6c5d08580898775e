"""Reads arguments between tags, each behind its key. What it writes is one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from inflight.asking.tools.keyword_reader import WHITE_SPACE
from inflight.asking.tools.syntax import TaggedArguments, pieces_of
from inflight.asking.tools.tag_overlap import tag_at, tag_overlap
from inflight.asking.tools.value_reader import MAX_SCALAR_CHARS, Progress, ValueReader
from inflight.asking.tools.value_types import TYPES, SchemaTypes, typed

MAX_KEY_CHARS = 256
NEEDS_MORE = -1

_SPACE = re.compile(r"[ \t\n\r]+")
_KEY = re.compile(r"[^<>\"\n]+")
_NUMBER = re.compile(r"[-+.0-9eE]*")
_WORDS = ("true", "false", "null", "True", "False", "None")


def _may_be_scalar(text: str) -> bool:
    """Whether a number or a word may begin so."""
    return bool(_NUMBER.fullmatch(text)) or any(word.startswith(text) for word in _WORDS)


class TaggedReader:
    """With the methods of a ValueReader. They have begun once the first key is read. `feed` stops early where the text
    ends within what may be a tag.

    A value that is no text by its schema is read as JSON; one that could be both is a text, unless all of it is a
    number or a word of a type that the schema allows, or it begins as a list or an object that it allows.
    """

    def __init__(self, syntax: TaggedArguments, closing: str, schema: dict[str, Any]) -> None:
        """`closing`: stands behind the last one, and is read, too."""
        self.progress = Progress.MORE
        self.has_begun = False
        self._syntax = syntax
        self._closing = closing
        self._properties = schema["properties"]
        self._schema_types = SchemaTypes(schema)
        (self._before_key,) = pieces_of(syntax.before_key)
        (self._end,) = pieces_of(syntax.behind_value)
        self._key = ""
        self._types = TYPES
        self._behind_key: list[tuple[tuple[str, ...], bool]] = []
        self._pieces: list[str] = []
        self._raw: list[str] = []  # read since something was written
        self._held = ""  # of a value, while it is not known what it is; or a line's end, which may be its last
        self._written: list[str] = []
        self._value: ValueReader | None = None
        self._is_first = True
        self._state: Callable[[str, int, int], int] = self._read_next

    @property
    def unwritten(self) -> str:
        return "".join(self._raw) + self._held + (self._value.unwritten if self._value else "")

    def finish(self) -> None:
        if self._value:
            self._value.finish()
            self._written.append(self._value.take() + self._value.unwritten)
        elif self._state == self._read_scalar and "string" not in self._types:
            self._written.append(typed(self._held.strip(), self._types) or "")

    def take(self) -> str:
        written = "".join(self._written)
        self._written.clear()
        return written

    def feed(self, text: str, start: int, end: int) -> int:
        position, had_begun = start, self.has_begun
        while position < end and self.progress is Progress.MORE and self.has_begun == had_begun:
            stop = self._state(text, position, end)
            if stop == NEEDS_MORE:
                break
            position = stop
        return position

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _read_next(self, text: str, position: int, end: int) -> int:
        """Before a key, or at the end."""
        if text[position] in WHITE_SPACE:
            return self._pass_space(text, position, end)
        tag = tag_at(text, position, end, (self._before_key, self._closing))
        if tag is None:
            return NEEDS_MORE
        if not tag:
            return self._break(position)
        if tag == self._closing:
            self._write("{}" if self._is_first else "}")
            self.progress = Progress.DONE
            return position + len(tag)
        self._key, self._state = "", self._read_key
        return self._pass(tag, position)

    def _read_key(self, text: str, position: int, end: int) -> int:
        key = _KEY.match(text, position, min(end, position + MAX_KEY_CHARS - len(self._key)))
        if key:
            self._key += key[0]
            return self._pass(key[0], position)
        if not self._key:
            return self._break(position)
        ways = [pieces_of(each) for each in (self._syntax.behind_key, self._syntax.behind_json_key) if each]
        tag = tag_at(text, position, end, [way[0] for way in ways])
        if tag is None:
            return NEEDS_MORE
        if not tag:
            return self._break(position)
        self._choose(is_json=len(ways) > 1 and tag == ways[1][0])
        self._pieces = list(ways[0][1:])
        self._state = self._read_behind_key
        position = self._pass(tag, position)
        return position if self._pieces else self._end_key(position)

    def _choose(self, *, is_json: bool) -> None:
        """What the value may be."""
        self._types = self._schema_types.of(self._properties.get(self._key))
        if self._syntax.behind_json_key:
            self._types = TYPES - {"string"} if is_json else frozenset({"string"})

    def _read_behind_key(self, text: str, position: int, end: int) -> int:
        if text[position] in WHITE_SPACE:
            return self._pass_space(text, position, end)
        tag = tag_at(text, position, end, self._pieces[:1])
        if tag is None:
            return NEEDS_MORE
        if not tag:
            return self._break(position)
        self._pieces.pop(0)
        position = self._pass(tag, position)
        return position if self._pieces else self._end_key(position)

    def _end_key(self, position: int) -> int:
        self._write(("{" if self._is_first else ", ") + json.dumps(self._key, ensure_ascii=False) + ": ")
        self._is_first = False
        self._state = self._read_pad if self._syntax.pad else self._read_begin
        return position

    # -- values --------------------------------------------------------------------------------------------------------

    def _read_pad(self, text: str, position: int, end: int) -> int:
        self._state = self._read_begin
        return position + 1 if text[position] == self._syntax.pad else position

    def _read_begin(self, text: str, position: int, end: int) -> int:
        char, may_be_text = text[position], "string" in self._types
        if self._types == {"string"}:
            return self._begin_text(position)
        if char in WHITE_SPACE and not may_be_text:
            return position + 1
        opens = {"{": "object", "[": "array"}.get(char, "")
        if opens in self._types or (char == '"' and self._syntax.behind_json_key):
            self._value, self._state = ValueReader(), self._read_json
        else:
            self._state = self._read_scalar
        return position

    def _read_json(self, text: str, position: int, end: int) -> int:
        value = self._value
        if value is None:
            return self._read_end(text, position, end)
        position = value.feed(text, position, end)
        self._written.append(value.take())
        if value.progress is Progress.DONE:
            self._value = None
        elif value.progress is Progress.BROKEN:
            self.progress = Progress.BROKEN
        return position

    def _read_end(self, text: str, position: int, end: int) -> int:
        """Behind a value as JSON."""
        if text[position] in WHITE_SPACE:
            return self._pass_space(text, position, end)
        tag = tag_at(text, position, end, (self._end,))
        if tag is None:
            return NEEDS_MORE
        if not tag:
            return self._break(position)
        return self._end_value(position)

    def _read_scalar(self, text: str, position: int, end: int) -> int:
        """What is a number or a word, perhaps: nothing is written of it before it is whole."""
        found = text.find(self._end, position, end)
        stop = found if found >= 0 else end - tag_overlap(text[:end], self._end, position)
        if len(self._held) + stop - position > MAX_SCALAR_CHARS:
            return self._begin_text(position)
        self._held += text[position:stop]
        if found < 0:
            if not _may_be_scalar(self._held.strip()):
                self._begin_text(stop)
            return stop if stop > position else NEEDS_MORE
        scalar = typed(self._held.strip(), self._types)
        if scalar is None:
            self._begin_text(position)
            self._write_text("")
            self._written.append('"')
        else:
            self._held = ""
            self._written.append(scalar)
        return self._end_value(stop)

    def _begin_text(self, position: int) -> int:
        self._written.append('"')
        self._state = self._read_text
        return position

    def _read_text(self, text: str, position: int, end: int) -> int:
        found = text.find(self._end, position, end)
        if found >= 0:
            self._write_text(text[position:found])
            self._written.append('"')
            return self._end_value(found)
        stop = end - tag_overlap(text[:end], self._end, position)
        if stop == position:
            return NEEDS_MORE
        piece = self._held + text[position:stop]
        self._held = "\n" if self._syntax.pad and piece.endswith("\n") else ""
        piece = piece[: len(piece) - len(self._held)]
        self._written.append(json.dumps(piece, ensure_ascii=False)[1:-1])
        return stop

    def _write_text(self, piece: str) -> None:
        """The last piece of a text."""
        piece = self._held + piece
        self._held = ""
        if self._syntax.pad and piece.endswith(self._syntax.pad):
            piece = piece[:-1]
        self._written.append(json.dumps(piece, ensure_ascii=False)[1:-1])

    def _end_value(self, position: int) -> int:
        self._raw.clear()
        self._held = ""
        self._state = self._read_next
        return position + len(self._end)

    # -- what is read and what is written ------------------------------------------------------------------------------

    def _pass(self, text: str, position: int) -> int:
        self._raw.append(text)
        return position + len(text)

    def _pass_space(self, text: str, position: int, end: int) -> int:
        space = _SPACE.match(text, position, end)
        return self._pass(space[0] if space else "", position)

    def _write(self, text: str) -> None:
        self._written.append(text)
        self._raw.clear()
        self.has_begun = True

    def _break(self, position: int) -> int:
        self.progress = Progress.BROKEN
        return position
