"""Regular expressions in Python's syntax, which the whole output matches.

Python's own parser says what an expression means; what it cannot read, Unicode's classes as in `\\p{L}`, stands in for
it as a character of a private plane. Facts on what Python means: https://docs.python.org/3/library/re.html.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from inflight.guides.lark.expression import LAST, Characters, Either, Node, Repeat, Sequence, Text
from inflight.guides.limits import MAX_FOLDED_RANGE
from inflight.guides.refusal import GuideRefused

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

ASCII, DOTALL, IGNORECASE = int(re.ASCII), int(re.DOTALL), int(re.IGNORECASE)
MULTILINE, VERBOSE = int(re.MULTILINE), int(re.VERBOSE)
STAND_INS = 0xF0000
"""First of the characters that stand for classes."""
PROPERTY = re.compile(r"\\[pP](?:[A-Z]|\{\^?[A-Za-z_=]{1,40}\})")
WORD = (r"\p{L}", r"\p{N}")
"""With `_` what str.isalnum() takes, by Unicode's general categories."""
SPACE = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
"""What str.isspace() takes."""
CATEGORIES = {
    "DIGIT": Characters(classes=(r"\p{Nd}",)),
    "WORD": Characters(ranges=((0x5F, 0x5F),), classes=WORD),
    "SPACE": Characters(ranges=SPACE),
}
ASCII_CATEGORIES = {
    "DIGIT": Characters(ranges=((0x30, 0x39),)),
    "WORD": Characters(ranges=((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))),
    "SPACE": Characters(ranges=((0x09, 0x0D), (0x20, 0x20))),
}
REFUSED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a back reference",
    "GROUPREF_IGNORE": "a back reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
    "AT_BOUNDARY": "a word boundary",
    "AT_NON_BOUNDARY": "a word boundary",
}
"""Parts by the names of Python's parser, which no lexer can follow."""
BEGINNINGS = ("AT_BEGINNING", "AT_BEGINNING_STRING")
ENDS = ("AT_END", "AT_END_STRING")


def read_regex(pattern: str) -> Node:
    """Raises GuideRefused."""
    text, classes = _stand_ins(pattern)
    try:
        parsed = _parser.parse(text)
    except re.error as error:
        where = "" if error.pos is None or classes else f" at character {error.pos + 1}"
        reason = error.msg
        for code, name in classes.items():
            reason = reason.replace(chr(code), name)
        raise GuideRefused(f"is no regular expression: {reason[:80]}{where}") from None
    except (OverflowError, RecursionError):
        raise GuideRefused("is a regular expression beyond the bounds of Python's parser") from None
    return _Reader(classes).sequence(parsed, int(parsed.state.flags), True, True)


def _stand_ins(pattern: str) -> tuple[str, dict[int, str]]:
    """The expression with characters in place of Unicode's classes, and what each stands for. In sets, brackets and
    what other syntaxes have for operations on sets is escaped, as Python means it."""
    if any(ord(character) >= STAND_INS for character in pattern):
        raise GuideRefused("is a regular expression with characters of a private plane, which none can match")
    written: list[str] = []
    classes: dict[int, str] = {}
    place, in_set = 0, False
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            found = PROPERTY.match(pattern, place)
            if found:
                stand_in = STAND_INS + len(classes)
                classes[stand_in] = found[0]
                written.append(chr(stand_in))
                place = found.end()
                continue
            written.append(pattern[place : place + 2])
            place += 2
            continue
        if not in_set and character == "[":
            in_set = True
            begin = re.compile(r"\[\^?\]?").match(pattern, place)
            assert begin is not None
            written.append(begin[0])
            place = begin.end()
            continue
        if in_set and character == "]":
            in_set = False
        written.append("\\" + character if in_set and character in "[&~|" else character)
        place += 1
    return "".join(written), classes


class _Reader:
    def __init__(self, classes: dict[int, str]) -> None:
        self._classes = classes

    def sequence(self, parsed: Any, flags: int, at_start: bool, at_end: bool) -> Node:
        """`at_start`, `at_end`: nothing can stand before, behind it."""
        if flags & MULTILINE:
            raise GuideRefused("has a regular expression with the flag (?m), which is not served")
        if flags & VERBOSE:
            raise GuideRefused("has a regular expression with the flag (?x), which is not served")
        items = list(parsed)
        behind = len(items)
        while behind and str(items[behind - 1][0]) == "AT" and str(items[behind - 1][1]) in ENDS:
            behind -= 1
        parts: list[Node] = []
        for place, (op, value) in enumerate(items):
            if str(op) == "AT":
                name = str(value)
                if (name in BEGINNINGS and at_start and not parts) or (name in ENDS and at_end and place >= behind):
                    continue
                raise _refused(REFUSED.get(name, "an anchor within"))
            parts.append(self._part(op, value, flags, at_start and not parts, at_end and place >= behind - 1))
        return parts[0] if len(parts) == 1 else Sequence(_joined(parts))

    def _part(self, op: Any, value: Any, flags: int, at_start: bool, at_end: bool) -> Node:
        name = str(op)
        if name in REFUSED:
            raise _refused(REFUSED[name])
        if name == "LITERAL":
            return self._literal(value, flags)
        if name == "ANY":
            return Characters(is_negated=True, ranges=() if flags & DOTALL else ((0x0A, 0x0A),))
        if name == "NOT_LITERAL":
            return self._set([(_parser.NEGATE, None), (_parser.LITERAL, value)], flags)
        if name == "IN":
            return self._set(value, flags)
        if name == "BRANCH":
            return Either(tuple(self.sequence(branch, flags, at_start, at_end) for branch in value[1]))
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            return self.sequence(inner, (flags | int(added)) & ~int(removed), at_start, at_end)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = value
            one = high == 1
            part = self.sequence(inner, flags, at_start and one, at_end and one)
            return Repeat(part, int(low), None if high is _parser.MAXREPEAT else int(high))
        raise _refused(name.lower().replace("_", " "))

    def _literal(self, code: int, flags: int) -> Node:
        if code in self._classes:
            return Characters(classes=(self._classes[code],))
        _check_character(code)
        if flags & IGNORECASE and len(ranges := _folded(code, code, flags)) > 1:
            return Characters(ranges=ranges)
        return Text(chr(code))

    def _set(self, items: Any, flags: int) -> Node:
        ranges: list[tuple[int, int]] = []
        classes: list[str] = []
        is_negated = False
        categories = ASCII_CATEGORIES if flags & ASCII else CATEGORIES
        for op, value in items:
            name = str(op)
            if name == "NEGATE":
                is_negated = True
            elif name == "CATEGORY":
                category = str(value).removeprefix("CATEGORY_")
                known = categories[category.removeprefix("NOT_").removeprefix("UNI_").removeprefix("UNI_NOT_")]
                if "NOT_" in category:
                    classes.append(set_source(known, is_negated=True))
                else:
                    ranges += known.ranges
                    classes += known.classes
            elif name == "LITERAL" and value in self._classes:
                classes.append(self._classes[value])
            else:
                low, high = (value, value) if name == "LITERAL" else value
                if low in self._classes or high in self._classes:
                    raise GuideRefused("has a regular expression with a class of characters as the end of a range")
                _check_character(low)
                ranges += _folded(low, high, flags) if flags & IGNORECASE else [(low, high)]
        return Characters(tuple(dict.fromkeys(ranges)), tuple(dict.fromkeys(classes)), is_negated)


def set_source(characters: Characters, *, is_negated: bool | None = None) -> str:
    """The set in the syntax of Rust's crate regex-syntax."""
    negated = characters.is_negated if is_negated is None else is_negated
    if negated and not characters.ranges and not characters.classes:
        return "(?s:.)"
    inner = "".join(
        _code(low) if low == high else f"{_code(low)}-{_code(high)}"
        for first, last in characters.ranges
        for low, high in _without_surrogates(first, last)
    )
    return f"[{'^' if negated else ''}{inner}{''.join(characters.classes)}]"


def _without_surrogates(low: int, high: int) -> list[tuple[int, int]]:
    parts = ((low, min(high, 0xD7FF)), (max(low, 0xE000), min(high, LAST)))
    return [part for part in parts if part[0] <= part[1]]


def _code(code: int) -> str:
    return rf"\x{{{code:x}}}"


def _folded(low: int, high: int, flags: int) -> tuple[tuple[int, int], ...]:
    """The characters of a range, and those that differ in their case alone."""
    if high - low >= MAX_FOLDED_RANGE:
        raise GuideRefused(f"ignores the case of a range of more than {MAX_FOLDED_RANGE} characters")
    if flags & ASCII:
        own = [chr(code) for code in range(low, high + 1) if code < 128]
    else:
        own = [chr(code) for code in range(low, high + 1)]
    others = {other for each in own for other in (each.lower(), each.upper()) if len(other) == 1}
    found = sorted(ord(each) for each in others if not low <= ord(each) <= high)
    return ((low, high), *((code, code) for code in found))


def _check_character(code: int) -> None:
    if 0xD800 <= code <= 0xDFFF:
        raise GuideRefused("has a regular expression with half of a surrogate pair")


def _joined(parts: list[Node]) -> tuple[Node, ...]:
    """Neighbouring texts as one."""
    joined: list[Node] = []
    for part in parts:
        if joined and isinstance(part, Text) and isinstance(before := joined[-1], Text):
            joined[-1] = Text(before.value + part.value)
        else:
            joined.append(part)
    return tuple(joined)


def _refused(what: str) -> GuideRefused:
    return GuideRefused(f"has a regular expression with {what}, which is not served")
