"""The grammar of a forced call is one that the engine's library compiles, and what follows it is parsed as calls."""

from __future__ import annotations

import json

import pytest
import xgrammar

from inflight.asking.tools.events import Content, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.families import FORCED
from inflight.asking.tools.guide import forced_call_guide
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool
from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuideType

pytestmark = pytest.mark.slow  # the library imports torch

WEATHER = Tool(
    name="get_weather",
    parameters={
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
        "required": ["city"],
        "$defs": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    },
)
PING = Tool(name="ping")
TOOLS = [WEATHER, PING]

ROME = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}'
PINGED = '{"name": "ping", "parameters": {}}'


def follows(text: str, *, name: str | None = None, parallel_tool_calls: bool = True) -> bool:
    """Whether the whole text follows the grammar of a forced call."""
    params = forced_call_guide(TOOLS, name=name, parallel_tool_calls=parallel_tool_calls)
    assert params.guide_type is GuideType.STRUCTURAL_TAG
    info = xgrammar.TokenizerInfo([*map(chr, range(32, 127)), "</s>"], stop_token_ids=[95])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(params.guide)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(95)


@pytest.mark.parametrize("text", [f"[{ROME}]", f"[{PINGED}]", f"[{ROME}, {PINGED}, {ROME}]"])
def test_required_means_one_call_or_more(text: str) -> None:
    assert follows(text)
    parser = make_tool_parser(FORCED, TOOLS)
    events = [*parser.feed(text), *parser.finish()]
    assert not any(isinstance(event, Content) for event in events)
    started = [event.name for event in events if isinstance(event, ToolCallStarted)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, ToolCallArguments)]
    meant = json.loads(text)
    assert started == [call["name"] for call in meant] and arguments == [call["parameters"] for call in meant]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "hello",
        ROME,
        f"[{ROME}",
        f"[{ROME}] and so on",
        ROME.replace("Rome", "Oslo").join("[]"),
        ROME.replace("get_weather", "rm").join("[]"),
        PINGED.replace("{}", '{"a": 1}').join("[]"),
    ],
)
def test_nothing_else_follows_it(text: str) -> None:
    assert not follows(text)


def test_a_name_means_exactly_one_call_of_it() -> None:
    assert follows(f"[{ROME}]", name="get_weather")
    assert not follows(f"[{PINGED}]", name="get_weather")
    assert not follows(f"[{ROME}, {ROME}]", name="get_weather")


def test_without_parallel_calls_there_is_one() -> None:
    assert follows(f"[{PINGED}]", parallel_tool_calls=False)
    assert not follows(f"[{PINGED}, {ROME}]", parallel_tool_calls=False)


def test_what_has_no_grammar_is_refused_with_one_sentence() -> None:
    with pytest.raises(InvalidRequest, match="tool_choice asks for the tool nope, and the request does not have it"):
        forced_call_guide(TOOLS, name="nope")
    with pytest.raises(InvalidRequest, match="tool_choice asks for a tool, and the request does not have it"):
        forced_call_guide([])
    with pytest.raises(InvalidRequest, match=r"tool_choice needs a grammar of \d+ bytes .*, more than 65536"):
        forced_call_guide([Tool(name=f"f{index}", parameters={"description": "x" * 900}) for index in range(80)])
