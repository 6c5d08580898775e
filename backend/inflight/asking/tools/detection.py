"""Which family's calls a text holds: found by trying each parser on a call whose name and arguments are known."""

from __future__ import annotations

import json
from typing import Any

from inflight.asking.tools.channels import ChannelSplitter
from inflight.asking.tools.events import Content, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.families import FAMILIES
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool


def families_reading(text: str, name: str, arguments: dict[str, Any]) -> list[str]:
    """The families whose parsers find exactly one call in `text`, that of the tool `name` with these arguments. Other
    text may stand around it. Of several, those that take all before it as a part of calls, and of these the ones that
    would write its beginning so to the letter."""
    found = [
        family
        for family in FAMILIES
        if _calls(family, text, name)[0] == [(name, arguments)]
        # A call without a tag behind something else could be that of a family that is not known.
        and (_has_nothing_before(family, text, name) or any(tag in text for tag in FAMILIES[family].begins))
    ]
    for is_better in (_has_nothing_before, _writes_so):
        better = [family for family in found if is_better(family, text, name)]
        found = better if len(found) > 1 and better else found
    return found


def _has_nothing_before(family: str, text: str, name: str) -> bool:
    return not _calls(family, text, name)[1].strip()


def _writes_so(family: str, text: str, name: str) -> bool:
    return any(head in text for head in FAMILIES[family].head(name))


def _calls(family: str, text: str, name: str) -> tuple[list[tuple[str, Any]], str]:
    """The calls in `text` as this family writes them, and the text before the first; the arguments of one that breaks
    off are None."""
    parser = make_tool_parser(family, [Tool(name=name)])
    if FAMILIES[family].in_messages:
        splitter = ChannelSplitter()
        parts = [*splitter.feed(text), *splitter.finish()]
        text = "".join(part.text for part in parts if isinstance(part, Content))
    events = [*parser.feed(text), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    texts = [
        "".join(event.text for event in events if isinstance(event, ToolCallArguments) and event.index == index)
        for index in range(len(names))
    ]
    before = events[0].text if events and isinstance(events[0], Content) else ""
    return list(zip(names, map(_value, texts), strict=True)), before


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
