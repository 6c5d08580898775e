"""A client's own grammar in llguidance's Lark: its schemas are prepared as all others are, its options are ours.

Allowed are rules, terminals, `%import` of the library's own, `%ignore`, `%json` and `%regex`. Refused are options
(`%llguidance`), other grammars (`@name`), tokens (`<name>`, `<[id]>`) and what decides sampling or takes text back
(`stop`, `max_tokens`, `temperature`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from inflight.guides.lark.expression import Json
from inflight.guides.refusal import GuideRefused

PART = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"i?)
      |(?P<comment>\#[^\n]*|//[^\n]*)
      |(?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
      |(?P<command>%[a-z]+)
      |(?P<token><[^\s<>"]+>)
      |(?P<grammar>@[A-Za-z0-9_-]+)
      |(?P<attribute>\b(?:stop|max_tokens|temperature)\b(?=[ \t]*=))
      |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
      |(?P<times>\{[^}\n]*\}|~[ \t]*\d[\d. \t]*)
      |(?P<other>[\s\S])""",
    re.X,
)
REFUSED = {
    "token": "names a token; write its text",
    "grammar": "refers to another grammar",
    "attribute": "is an attribute that is not served",
}
COMMANDS = ("%json", "%regex", "%import", "%ignore", "%declare")
MAX_TIMES = 1_000
START = "start"


def read_lark(text: str, json_of: Callable[[Any], Json], start: str = START) -> str:
    """The grammar with its schemas in place, its first rule named `start`, and no header. Raises GuideRefused."""
    written: list[str] = []
    place = 0
    decoder = json.JSONDecoder()
    while place < len(text):
        found = PART.match(text, place)
        assert found is not None
        kind, part = found.lastgroup or "other", found[0]
        place = found.end()
        if kind in REFUSED:
            raise _error(f"{part[:40]!r} {REFUSED[kind]}", text, found.start())
        if kind == "times" and any(int(number) > MAX_TIMES for number in re.findall(r"\d{1,9}", part)):
            raise _error(f"a repetition of more than {MAX_TIMES}", text, found.start())
        if kind == "command" and part not in COMMANDS:
            raise _error(f"{part[:40]} is not served", text, found.start())
        if part in ("%json", "%regex") and kind == "command":
            space = re.compile(r"\s*").match(text, place)
            assert space is not None
            try:
                value, place = decoder.raw_decode(text, space.end())
            except (ValueError, RecursionError):
                raise _error(f"{part} is not followed by valid JSON", text, found.start()) from None
            part += " " + (json_of(value).schema if part == "%json" else json.dumps(value))
        written.append(start if kind == "name" and part == START else part)
    if not re.search(r"^[ \t]*[?!]*start\b", text, re.M):
        raise GuideRefused("has no rule named start, which the output would follow")
    return "".join(written)


def _error(what: str, text: str, place: int) -> GuideRefused:
    line = text.count("\n", 0, place) + 1
    column = place - (text.rfind("\n", 0, place) + 1) + 1
    return GuideRefused(f"is no grammar that is served, line {line}, column {column}: {what}")
