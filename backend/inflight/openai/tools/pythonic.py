"""Calls in Python, of Llama 3.2 and 4: [f(a=1), g(b="x")], perhaps between <|python_start|> and <|python_end|>.

Arguments are literals and are given by keyword. They are read by `value_reader`, so that nothing is evaluated.
"""

from __future__ import annotations

import json
import re

from inflight.openai.tools.call_machine import CallMachine
from inflight.openai.tools.call_reader import WHITE_SPACE
from inflight.openai.tools.tool import MAX_NAME_CHARS
from inflight.openai.tools.value_reader import Spelling, ValueReader

MAX_KEYWORD_CHARS = 256

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_KEYWORD = re.compile(r"\w+")


class PythonicParser(CallMachine):
    """A call is certain, and starts, once its first keyword and the sign of equality are read."""

    tag = "<|python_start|>"
    closing_tag = "<|python_end|>"
    opening = "["

    def _begin_calls(self) -> None:
        self._state = self._read_bracket

    def _read_bracket(self, text: str, position: int) -> int:
        if text[position] in WHITE_SPACE:
            return self._hold_gap(text, position)
        if text[position] != "[":
            self._give_up()
            return position
        self._begin_listed_call()
        return self._hold_one(text, position)

    def _begin_listed_call(self) -> None:
        self._word = ""
        self._state = self._read_name

    def _expect_keyword(self, text: str, position: int) -> int:
        """Pass a character that an argument follows."""
        self._word = ""
        self._state = self._read_keyword
        return self._hold_one(text, position)

    def _hold_one(self, text: str, position: int) -> int:
        self._hold(text[position])
        return position + 1

    def _read_name(self, text: str, position: int) -> int:
        if text[position] in WHITE_SPACE and not self._word:
            return self._hold_gap(text, position)
        name = _NAME.match(text, position, position + MAX_NAME_CHARS - len(self._word))
        if name:
            self._word += name[0]
            self._hold(name[0])
            return name.end()
        if text[position] == "(" and self._word in self._names:
            self._name, self._keywords = self._word, set[str]()
            return self._expect_keyword(text, position)
        self._give_up()
        return position

    def _read_keyword(self, text: str, position: int) -> int:
        char = text[position]
        if char in WHITE_SPACE:
            return self._hold_gap(text, position)
        keyword = _KEYWORD.match(text, position, position + MAX_KEYWORD_CHARS - len(self._word))
        if keyword:
            self._word += keyword[0]
            self._hold(keyword[0])
            return keyword.end()
        if char == "=" and self._word.isidentifier() and self._word not in self._keywords:
            return self._begin_argument(position)
        if char == ")" and not self._word:
            return self._close_call(position)  # no arguments, or a comma behind the last one
        self._give_up()
        return position

    def _begin_argument(self, position: int) -> int:
        if self._keywords:
            self._drop_held()
        else:
            self._start_call(self._name)
        self._add_arguments((", " if self._keywords else "{") + json.dumps(self._word, ensure_ascii=False) + ": ")
        self._keywords.add(self._word)
        self._state = self._read_space
        return position + 1

    def _read_space(self, text: str, position: int) -> int:
        """Between the sign of equality and the value."""
        if text[position] in WHITE_SPACE:
            return position + 1
        self._value = ValueReader(Spelling.PYTHON)
        self._state = self._read_value
        return position

    def _end_value(self) -> None:
        self._state = self._read_comma

    def _read_comma(self, text: str, position: int) -> int:
        """Behind an argument."""
        char = text[position]
        if char in WHITE_SPACE:
            return self._hold_gap(text, position)
        if char == ",":
            return self._expect_keyword(text, position)
        if char == ")":
            return self._close_call(position)
        self._give_up()
        return position

    def _close_call(self, position: int) -> int:
        if not self._keywords:
            self._start_call(self._name)
            self._add_arguments("{")
        self._add_arguments("}")
        self._drop_held()
        self._is_calling = False
        self._state = self._read_list
        return position + 1
