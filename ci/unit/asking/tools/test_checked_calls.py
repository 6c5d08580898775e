"""The arguments of calls that a grammar has held to a schema are given to who checks answers, once they are whole."""

from __future__ import annotations

import pytest

from inflight.asking.chat import Chat
from inflight.asking.chat_format import ChatReader
from inflight.asking.tool_choice import ToolChoice
from inflight.asking.tool_use import read_tools
from inflight.asking.tools.tool import Tool
from inflight.guided_decoding import GuidedDecodingParams
from inflight.guides.last_check import Breach, find_breach

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "minLength": 3}}, "required": ["city"]}
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'
WRONG = '{"city": "R"}'


def forced(*calls: str) -> str:
    return "[" + ", ".join(f'{{"name": "weather", "parameters": {call}}}' for call in calls) + "]"


def chosen(*calls: str) -> str:
    return "".join(f'<tool_call>\n{{"name": "weather", "arguments": {call}}}\n</tool_call>' for call in calls)


def checked(text: str, *, strict: bool, mode: str = "") -> list[tuple[str, str, Breach | None]]:
    """What a choice of this text tells the check, and what that finds."""
    tool = Tool(name="weather", parameters=SCHEMA, strict=strict)
    use = read_tools(Chat(messages=[], tools=[tool], tool_choice=ToolChoice(mode=mode)), "hermes")
    assert use is not None
    told: list[tuple[str, str, Breach | None]] = []

    def check_text(name: str, params: GuidedDecodingParams, arguments: str) -> None:
        told.append((name, arguments, find_breach(params, arguments)))

    reader = ChatReader(use.format(check_text))
    for char in text:
        reader.feed(char)
    reader.finish()
    return told


NAME = "a call of the tool weather"


def test_each_whole_call_is_held_against_its_tools_schema() -> None:
    found = [(NAME, ROME, None), (NAME, WRONG, Breach("/properties/city", "minLength"))]
    assert checked(chosen(ROME, WRONG), strict=True) == found
    assert checked(forced(ROME, WRONG), strict=True, mode="required") == found


def test_a_call_that_was_cut_is_not_checked() -> None:
    assert checked(chosen(ROME, OSLO)[:-30], strict=True) == [(NAME, ROME, None)]
    assert checked(forced(ROME)[:-4], strict=True, mode="required") == []


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_that_is_not_strict_is_held_to_no_schema(choice: str) -> None:
    text = forced(WRONG) if choice == "required" else chosen(WRONG)
    is_held = choice == "required"
    assert checked(text, strict=False, mode=choice) == ([(NAME, WRONG, None)] if is_held else [])
