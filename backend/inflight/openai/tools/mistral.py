"""Calls of Mistral: [TOOL_CALLS][{"name": "f", "arguments": {…}}, …], and from version 11 of its tokenizer on, for each
call, [TOOL_CALLS]f[ARGS]{…} or [TOOL_CALLS]f[CALL_ID]…[ARGS]{…}.

The tags are special tokens: the text has to be made with them.
"""

from __future__ import annotations

import re

from inflight.openai.tools.call_machine import NEEDS_MORE
from inflight.openai.tools.call_reader import WHITE_SPACE
from inflight.openai.tools.json_list import JsonListParser
from inflight.openai.tools.tool import MAX_NAME_CHARS
from inflight.openai.tools.value_reader import ValueReader

ARGUMENTS_TAG = "[ARGS]"
ID_TAG = "[CALL_ID]"

_WORD = re.compile(r"[a-zA-Z0-9_-]+")


class MistralParser(JsonListParser):
    """An id that the model wrote is dropped: the call gets one as all others do."""

    tag = "[TOOL_CALLS]"
    inner_tags = (ARGUMENTS_TAG, ID_TAG)
    opening = ""

    def _begin_calls(self) -> None:
        self._word = ""
        self._name = ""
        self._state = self._read_list_or_name

    def _read_list_or_name(self, text: str, position: int) -> int:
        if text[position] in WHITE_SPACE:
            return self._hold_gap(text, position)
        self._state = self._read_bracket if text[position] == "[" else self._read_word
        return position

    def _read_word(self, text: str, position: int) -> int:
        """A name, or the model's id of the call."""
        word = _WORD.match(text, position, position + MAX_NAME_CHARS - len(self._word))
        if word:
            self._word += word[0]
            self._hold(word[0])
            return word.end()
        tags = (ARGUMENTS_TAG,) if self._name else (ARGUMENTS_TAG, ID_TAG)
        tag = self._tag_at(text, position, *tags)
        if tag is None:
            return NEEDS_MORE
        self._name = self._name or self._word
        if not tag or self._name not in self._names:
            self._give_up()
            return position
        self._hold(tag)
        self._word = ""
        self._state = self._read_brace if tag == ARGUMENTS_TAG else self._read_word
        return position + len(tag)

    def _read_brace(self, text: str, position: int) -> int:
        """Behind the tag of the arguments."""
        if text[position] in WHITE_SPACE:
            return self._hold_gap(text, position)
        if text[position] == "{":
            self._start_call(self._name)
            self._value = ValueReader()
            self._state = self._read_value
        else:
            self._give_up()
        return position

    def _end_value(self) -> None:
        self._is_calling = False
        self._state = self._read_between  # not in a list
