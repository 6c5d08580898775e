"""Grammars in EBNF as XGrammar takes it, and in GBNF as llama.cpp does.

Rules `name ::= …`, of which `root` is the first to be followed; literals and sets with escapes, `.`, parentheses,
`* + ?`, `{m}`, `{m,}`, `{m,n}`, `|`, and comments behind `#`. A rule goes on until the next begins, over any lines.
"""

from __future__ import annotations

import re

from inflight.guides.lark.expression import (
    LAST,
    NOTHING,
    Characters,
    Either,
    Grammar,
    Node,
    Reference,
    Repeat,
    Sequence,
    Text,
)
from inflight.guides.limits import MAX_EXPANDED
from inflight.guides.refusal import GuideRefused

SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*|[0-9]+[A-Za-z_-][A-Za-z0-9_.-]*")
DEFINED = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*::=")
TIMES = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}")
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,8})\}|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.S)
PLAIN = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
PUNCTUATION = frozenset("\"'\\[]()-^./*+?|{}=<>:;,!@#$%&~` _")
ROOT = "root"


def read_ebnf(text: str) -> Grammar:
    """Raises GuideRefused with the line and the column."""
    return _Parser(text).grammar()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def grammar(self) -> Grammar:
        rules: dict[str, Node] = {}
        used: dict[str, int] = {}
        self._used = used
        self._space()
        while self._place < len(self._text):
            begin = self._place
            name = self._name()
            if name is None or DEFINED.match(self._text, self._place) is None:
                raise self._error("a rule must begin with its name and ::=", begin)
            self._place = self._matched(DEFINED).end()
            if name in rules:
                raise self._error(f"the rule {name[:40]} is defined twice", begin)
            rules[name] = self._alternatives()
            if self._peek() == ")":
                raise self._error("a parenthesis closes nothing", self._place)
        if ROOT not in rules:
            raise GuideRefused("has no rule named root, which the output would follow")
        for name, place in used.items():
            if name not in rules:
                raise self._error(f"there is no rule {name[:40]}", place)
        return Grammar(Reference(ROOT), rules)

    def _alternatives(self) -> Node:
        found = [self._sequence()]
        while self._peek() == "|":
            self._place += 1
            found.append(self._sequence())
        return found[0] if len(found) == 1 else Either(tuple(found))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        self._space()
        while (part := self._atom()) is not None:
            parts.append(self._repeated(part))
            self._space()
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _atom(self) -> Node | None:
        """None where the sequence ends."""
        character, begin = self._peek(), self._place
        if character in ("", "|", ")"):
            return None
        if character == '"':
            return self._literal()
        if character == "[":
            return self._set()
        if character == ".":
            self._place += 1
            return Characters(is_negated=True)
        if character == "(":
            if self._text.startswith("(=", self._place):
                raise self._error("look-ahead (=…) is not served", begin)
            self._place += 1
            node = self._alternatives()
            if self._peek() != ")":
                raise self._error("a parenthesis is not closed", begin)
            self._place += 1
            return node
        if character in "<!":
            raise self._error("tokens such as <name> or <[id]> are not served: write their text", begin)
        name = self._name()
        if name is None:
            raise self._error(f"{character!r} is not expected here", begin)
        if DEFINED.match(self._text, self._place):
            self._place = begin
            return None
        if self._peek() == "(":
            raise self._error(f"the macro {name[:40]}(…) is not served", begin)
        self._used.setdefault(name, begin)
        return Reference(name)

    def _repeated(self, part: Node) -> Node:
        while True:
            found = re.compile(r"[ \t]*").match(self._text, self._place)
            assert found is not None
            place = found.end()
            sign = self._text[place : place + 1]
            if sign and sign in "*+?":
                self._place = place + 1
                part = Repeat(part, *{"*": (0, None), "+": (1, None), "?": (0, 1)}[sign])
            elif sign == "{":
                times = TIMES.match(self._text, place)
                if times is None:
                    raise self._error("a repetition must be {m}, {m,} or {m,n}", place)
                low = int(times[1])
                high = (int(times[3]) if times[3] else None) if times[2] else low
                if high is not None and high < low:
                    raise self._error("a repetition ends below its beginning", place)
                if max(low, high or 0) > MAX_EXPANDED:
                    raise self._error(f"a repetition of more than {MAX_EXPANDED}", place)
                self._place = times.end()
                part = Repeat(part, low, high)
            else:
                return part

    def _literal(self) -> Node:
        begin = self._place
        self._place += 1
        written: list[str] = []
        while True:
            character = self._text[self._place : self._place + 1]
            if character in ("", "\n"):
                raise self._error("a literal is not closed", begin)
            if character == '"':
                self._place += 1
                return Text("".join(written)) if written else NOTHING
            written.append(self._character())

    def _set(self) -> Node:
        begin = self._place
        self._place += 1
        is_negated = self._peek() == "^"
        self._place += is_negated
        ranges: list[tuple[int, int]] = []
        while True:
            character = self._text[self._place : self._place + 1]
            if character in ("", "\n"):
                raise self._error("a set of characters is not closed", begin)
            if character == "]":
                self._place += 1
                break
            low = high = ord(self._character())
            if self._peek() == "-" and self._text[self._place + 1 : self._place + 2] not in ("]", ""):
                self._place += 1
                high = ord(self._character())
            if high < low:
                raise self._error("a range of characters ends below its beginning", begin)
            ranges.append((low, high))
        if not ranges and not is_negated:
            raise self._error("a set holds no character", begin)
        return Characters(tuple(ranges), is_negated=is_negated)

    def _character(self) -> str:
        if self._peek() != "\\":
            self._place += 1
            return self._text[self._place - 1]
        found = ESCAPE.match(self._text, self._place)
        if found is None:
            raise self._error("an escape is not complete", self._place)
        digits = next((group for group in found.groups()[:4] if group is not None), None)
        if digits is not None:
            code = int(digits, 16)
            if code > LAST or 0xD800 <= code <= 0xDFFF:
                raise self._error("an escape stands for no character", self._place)
            plain: str | None = chr(code)
        else:
            plain = PLAIN.get(found[5], found[5] if found[5] in PUNCTUATION else None)
        if plain is None:
            raise self._error(f"the escape {found[0]!r} is not known", self._place)
        self._place = found.end()
        return plain

    def _name(self) -> str | None:
        found = NAME.match(self._text, self._place)
        if found is None:
            return None
        self._place = found.end()
        return found[0]

    def _space(self) -> None:
        self._place = self._matched(SPACE).end()

    def _matched(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._place)
        assert found is not None
        return found

    def _peek(self) -> str:
        return self._text[self._place : self._place + 1]

    def _error(self, what: str, place: int) -> GuideRefused:
        line = self._text.count("\n", 0, place) + 1
        column = place - (self._text.rfind("\n", 0, place) + 1) + 1
        return GuideRefused(f"is no grammar that is served, line {line}, column {column}: {what}")
