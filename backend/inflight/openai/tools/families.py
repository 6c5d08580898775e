"""Which family's calls a text holds: found by trying each parser on a call whose name and arguments are known."""

from __future__ import annotations

import json
from typing import Any

from inflight.openai.tools.events import ToolCallArguments, ToolCallStarted
from inflight.openai.tools.parser import FORCED, PARSERS, make_tool_parser
from inflight.openai.tools.tool import Tool


def families_reading(text: str, name: str, arguments: dict[str, Any]) -> list[str]:
    """The families whose parsers find exactly one call in `text`, that of the tool `name` with these arguments. Other
    text may stand around it."""
    return [family for family in PARSERS if family != FORCED and _calls(family, text, name) == [(name, arguments)]]


def _calls(family: str, text: str, name: str) -> list[tuple[str, Any]]:
    """The calls in `text` as this family writes them; the arguments of one that breaks off are None."""
    parser = make_tool_parser(family, [Tool(name=name)])
    events = [*parser.feed(text), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    texts = [
        "".join(event.text for event in events if isinstance(event, ToolCallArguments) and event.index == index)
        for index in range(len(names))
    ]
    return list(zip(names, map(_value, texts), strict=True))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
