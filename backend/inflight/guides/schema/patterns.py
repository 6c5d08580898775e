"""Regular expressions of ECMA-262, as `pattern` has them, written as Rust's regex-syntax takes them.

`pattern` searches: what is without an anchor matches anywhere. llguidance searches as well, so that anchors stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from inflight.guides.refusal import GuideRefused

SPACE = r"\t\n\x0B\x0C\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
"""ECMA-262, 22.2.2.9: what `\\s` is."""
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_FIXED = {"u": re.compile(r"[0-9A-Fa-f]{4}"), "x": re.compile(r"[0-9A-Fa-f]{2}")}
_BRACED = re.compile(r"u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{([A-Za-z_=]+)\}")
NUMBERED = re.compile(r"[\x00-\x07\x0B\x0E-\x1F\x7F]")
"""Characters that JSON writes by their numbers alone."""
NUMBERED_CODE = re.compile(r"\\x\{([0-7BEF]|1[0-9A-F]|7F)\}")
"""Such a one in a regular expression."""
MAX_REPEATS = 2_000
"""Highest count of a repetition."""


def literal(text: str) -> str:
    """A regular expression for `text`."""
    return "".join(code_of(ord(c)) for c in text)


def exactly(texts: Iterable[str]) -> str:
    """An anchored regular expression of `texts`."""
    return f"^(?:{'|'.join(literal(text) for text in texts)})$"


def anything_but(texts: Iterable[str]) -> str:
    """An anchored regular expression of all other texts: a tree of their common beginnings, and how to leave it."""

    def leave(rest: list[str]) -> str:
        is_end = "" in rest
        branches: dict[str, list[str]] = {}
        for text in rest:
            if text:
                branches.setdefault(text[0], []).append(text[1:])
        ways = [] if is_end else [""]
        if branches:
            ways.append(f"[^{''.join(code_of(ord(c)) for c in branches)}](?s:.*)")
        else:
            ways.append("(?s:.+)")
        ways += [f"{literal(first)}{leave(more)}" for first, more in branches.items()]
        return f"(?:{'|'.join(ways)})"

    return f"^{leave(sorted(set(texts)))}$"


def code_of(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return f"\\x{{{code:X}}}"


class _Translation:
    def __init__(self, source: str, pointer: str) -> None:
        self.source = source
        self.pointer = pointer
        self.at = 0
        self.num_begins = self.num_ends = 0
        """Anchors that were read."""

    def refuse(self, what: str) -> GuideRefused:
        return GuideRefused(f"has a regular expression with {what}", pointer=self.pointer, keyword="pattern")

    def run(self) -> str:
        text = self.alternatives(0, True, True)
        if self.at < len(self.source):
            raise self.refuse("an unmatched bracket")
        return text

    def alternatives(self, depth: int, is_first: bool, is_last: bool) -> str:
        """`is_first`, `is_last`: whether an anchor may stand at its beginning and its end."""
        if depth > 30:
            raise self.refuse("groups deeper than 30")
        out: list[str] = []
        begun = False
        while self.at < len(self.source) and self.source[self.at] != ")":
            char = self.source[self.at]
            self.at += 1
            if char == "|":
                out.append("|")
                begun = False
            elif char == "^":
                if begun or not is_first:
                    raise self.refuse("an anchor within")
                out.append("^")
                self.num_begins += 1
            elif char == "$":
                if not is_last or self.source[self.at : self.at + 1] not in ("", "|", ")"):
                    raise self.refuse("an anchor within")
                out.append("$")
                self.num_ends += 1
            else:
                out.append(self.atom(char, depth, is_first and not begun, is_last) + self.count())
                begun = True
        return "".join(out)

    def atom(self, char: str, depth: int, is_first: bool, is_last: bool) -> str:
        if char == "(":
            return self.group(depth, is_first, is_last)
        if char == "[":
            return self.char_class()
        if char == ".":
            return r"[^\n\r\u{2028}\u{2029}]"
        if char == "\\":
            inside, is_negated = self.escape(False)
            return f"[{'^' if is_negated else ''}{inside}]"
        if char in "*+?":
            raise self.refuse("a repetition of nothing")
        if char in "{}]":
            return code_of(ord(char))
        return code_of(ord(char))

    def group(self, depth: int, is_first: bool, is_last: bool) -> str:
        if self.source.startswith("?", self.at):
            if self.source.startswith("?:", self.at):
                self.at += 2
            elif named := re.compile(r"\?<([A-Za-z_]\w*)>").match(self.source, self.at):
                self.at = named.end()
            else:
                raise self.refuse("look-around or flags")
        num_begins, num_ends = self.num_begins, self.num_ends
        inner = self.alternatives(depth + 1, is_first, is_last)
        if not self.source.startswith(")", self.at):
            raise self.refuse("an unmatched bracket")
        self.at += 1
        after = self.source[self.at : self.at + 1]
        if self.num_ends > num_ends and after not in ("", "|", ")"):
            raise self.refuse("an anchor within")
        if self.num_begins > num_begins and after and after in "*+?{":
            raise self.refuse("a repeated anchor")
        return f"(?:{inner})"

    def count(self) -> str:
        char = self.source[self.at : self.at + 1]
        if char and char in "*+?":
            self.at += 1
            text = char
        elif counted := _COUNT.match(self.source, self.at):
            if any(len(n) > 4 or int(n) > MAX_REPEATS for n in (counted[1], counted[3] or "0")):
                raise self.refuse(f"more than {MAX_REPEATS} repetitions")
            self.at = counted.end()
            text = counted[0]
        else:
            return ""
        if self.source.startswith("?", self.at):
            self.at += 1
        return text

    def escape(self, in_class: bool) -> tuple[str, bool]:
        """What goes within brackets for the escape behind a backslash, and whether it is the complement of that."""
        char = self.source[self.at : self.at + 1]
        self.at += 1
        if char.lower() in _CLASSES and char:
            return _CLASSES[char.lower()], char.isupper()
        if char in ("p", "P") and (named := _PROPERTY.match(self.source, self.at - 1)):
            self.at = named.end()
            return f"\\p{{{named[1]}}}", char == "P"
        if char == "c" and (letter := self.source[self.at : self.at + 1]).isascii() and letter.isalpha():
            self.at += 1
            return code_of(ord(letter) % 32), False
        if char == "u" and (braced := _BRACED.match(self.source, self.at - 1)):
            self.at = braced.end()
            return self.coded(int(braced[1], 16)), False
        if char in _FIXED:
            digits = _FIXED[char].match(self.source, self.at)
            if digits is None:
                raise self.refuse(f"an incomplete \\{char}")
            self.at = digits.end()
            code = int(digits[0], 16)
            low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self.source, self.at)
            if 0xD800 <= code < 0xDC00 and low:
                self.at = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            return self.coded(code), False
        if char in _CONTROLS and char:
            return code_of(_CONTROLS[char]), False
        if char == "b" and in_class:
            return code_of(8), False
        if char == "" or char.isalnum():
            raise self.refuse(f"\\{char}" if char else "a backslash at its end")
        return code_of(ord(char)), False

    def coded(self, code: int) -> str:
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self.refuse("half of a surrogate pair")
        return code_of(code)

    def char_class(self) -> str:
        negated = self.source.startswith("^", self.at)
        self.at += negated
        parts: list[str] = []
        while True:
            if self.at >= len(self.source):
                raise self.refuse("an unmatched bracket")
            char = self.source[self.at]
            self.at += 1
            if char == "]":
                break
            if char == "\\":
                inside, is_complement = self.escape(True)
                parts.append(f"[^{inside}]" if is_complement else inside)
            elif char == "-" and parts and self.source[self.at : self.at + 1] not in ("]", ""):
                parts.append("-")
            else:
                parts.append(code_of(ord(char)))
        if not parts:
            return "(?s:.)" if negated else r"[^\x{0}-\x{10FFFF}]"
        return f"[{'^' if negated else ''}{''.join(parts)}]"


def translate(source: object, pointer: str) -> str:
    """`source`, the value of `pattern` at `pointer`, for llguidance. Raises GuideRefused for what is no text, is
    malformed, or has look-around, back references or anchors that are not at an end."""
    if not isinstance(source, str):
        raise GuideRefused(
            "has a regular expression that is no text", pointer=pointer, keyword="pattern", is_final=True
        )
    return _Translation(source, pointer).run()
