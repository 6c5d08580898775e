"""Each family's grammar and its parser are of one description: what follows the grammar is read as calls that follow
their tools' schemas, and what models write follows it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import xgrammar
from tool_syntaxes import WRITINGS, parser_of, tame, written

from inflight.asking.tools.chosen_guide import chosen_call_guide
from inflight.asking.tools.events import Content, ToolCallArguments, ToolCallStarted
from inflight.asking.tools.families import ALIASES, FAMILIES, syntax_of
from inflight.asking.tools.parser import make_tool_parser
from inflight.asking.tools.tool import Tool
from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams

pytestmark = pytest.mark.slow  # the library imports torch

FEED = Tool(
    name="feed",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "animal": {"$ref": "#/$defs/animal"},
            "count": {"type": "integer", "minimum": 1, "maximum": 99},
            "food": {"type": "string", "description": "What it eats."},
            "gently": {"type": "boolean"},
            "days": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["animal", "count", "food"],
        "additionalProperties": False,
        "$defs": {"animal": {"type": "string", "enum": ["cat", "guinea pig"]}},
    },
)
STOP = Tool(name="stop", strict=True)
NOTE = Tool(name="note", parameters={"type": "object", "properties": {"text": {"type": "string"}}})
TOOLS = [FEED, STOP, NOTE]
SCHEMAS = {tool.name: jsonschema_rs.validator_for(tool.schema) for tool in TOOLS if tool.strict}
NOTHING = {"type": "const_string", "value": "none"}
FED = {
    "animal": "guinea pig",
    "count": 3,
    "food": "hay, \"dry\" – 100 % \\ 'x'\nand é",
    "gently": True,
    "days": [1, 2.5],
}
FED_LITTLE = {"animal": "cat", "count": 12, "food": "fish"}

NAMES = [name for name in WRITINGS if name != "json"]
SPECIAL_TOKENS = {"mistral": ("[ARGS]",)}
"""By which a checkpoint is known to write so."""
UNLIKE = {
    "granite4": "the object is a JSON text, which the grammar never writes",
    "mistral, version 11": "the grammar has the tag",
    "pythonic": "texts have other quotation marks",
    "lfm2": "texts have other quotation marks",
    "olmo3": "texts have other quotation marks",
}
"""What these write is not what the grammar has, though the parser takes it."""

CHARS = [chr(code) for code in range(32, 127)]


def guide(name: str, **options: Any) -> GuidedDecodingParams:
    return chosen_call_guide(parser_of(name), TOOLS, special_tokens=SPECIAL_TOKENS.get(name, ()), **options)


def follows(params: GuidedDecodingParams, text: str) -> bool:
    """Whether the whole text does."""
    info = xgrammar.TokenizerInfo([*CHARS, "</s>"], xgrammar.VocabType.RAW, stop_token_ids=[len(CHARS)])
    compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_structural_tag(params.guide)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.is_completed())


def read(name: str, text: str) -> tuple[list[tuple[str, Any]], str]:
    """The calls and the content that the family's parser finds."""
    parser = make_tool_parser(parser_of(name), TOOLS)
    events = [*parser.feed(text), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.index] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    values = [json.loads(each, parse_float=lambda number: min(max(float(number), -1e308), 1e308)) for each in arguments]
    return list(zip(names, values, strict=True)), content


every_name = pytest.mark.parametrize("name", NAMES)


@every_name
def test_what_models_write_is_read(name: str) -> None:
    calls = [("feed", FED), ("stop", {}), ("feed", FED_LITTLE)][: 1 if name == "internlm" else 3]
    assert read(name, written(name, calls)) == (calls, "")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNLIKE])
def test_what_models_write_follows_the_grammar(name: str) -> None:
    calls = [("feed", FED), ("stop", {}), ("feed", FED_LITTLE)][: 1 if name == "internlm" else 3]
    assert follows(guide(name), written(name, calls))
    assert follows(guide(name, answer=NOTHING), written(name, calls[:1]))
    assert not follows(guide(name), written(name, [("feed", {**FED, "animal": "cow"})]))
    assert not follows(guide(name), written(name, [("feed", {**FED, "count": 100})]))
    assert not follows(guide(name), written(name, [("feed", {"animal": "cat"})]))
    assert not follows(guide(name), written(name, [("rm", {})]))


@every_name
def test_what_follows_the_grammar_is_read_as_calls_that_follow_the_schemas(name: str) -> None:
    """Random outputs, which like to close what they open."""
    syntax = syntax_of(parser_of(name))
    tags = sorted({*syntax.tags(), *syntax.begins, "</parameter>", "<escape>", '"}'} - {""})
    words = [*CHARS, "\n", "é", *sorted({*"".join(tags)} - {*CHARS}), *tags, "</s>"]
    info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, stop_token_ids=[len(words) - 1])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    eager = [*(words.index(tag) for tag in tags), *map(words.index, "\"',)]}>\n")]
    found = dict.fromkeys((tool.name for tool in TOOLS), 0)
    for params in (guide(name, answer=NOTHING), guide(name)):
        compiled = compiler.compile_structural_tag(params.guide)
        for seed in range(12):
            text = sampled(compiled, words, eager, random.Random(seed))
            if text is None:
                continue
            calls, _ = read(name, text)
            for tool, arguments in calls:
                found[tool] += 1
                assert isinstance(arguments, dict), text
                assert tool not in SCHEMAS or SCHEMAS[tool].is_valid(arguments), (text, arguments)
    assert sum(found.values()) > 3, found


def sampled(compiled: Any, words: list[str], eager: list[int], choose: random.Random) -> str | None:
    """A text that follows the grammar, None if it becomes too long."""
    matcher, text = xgrammar.GrammarMatcher(compiled), ""
    allowed = np.zeros((1, -(-len(words) // 32)), dtype=np.int32)
    for _ in range(400):
        matcher.fill_next_token_bitmask(allowed, 0)
        bits = np.unpackbits(allowed.view(np.uint8)[0], bitorder="little", count=len(words))
        tokens = np.flatnonzero(bits).tolist()
        likely = [token for token in eager if token in tokens]
        token = choose.choice(likely if likely and choose.random() < 0.3 else tokens)
        assert matcher.accept_token(token)
        if token == len(words) - 1:
            return text
        text += words[token]
    return None


@every_name
def test_a_text_that_is_cut_anywhere_has_the_beginning_of_its_calls(name: str) -> None:
    calls = tame(name, [("feed", FED), ("note", {"text": "a"})])[: 1 if name == "internlm" else 2]
    text = written(name, calls)
    whole = [json.dumps(arguments, ensure_ascii=False) for _, arguments in calls]
    for length in range(len(text)):
        parser = make_tool_parser(parser_of(name), TOOLS)
        events = parser.feed(text[:length])
        assert not any(isinstance(event, Content) for event in events), "no part of a tag is shown"
        events += parser.finish()
        names = [event.name for event in events if isinstance(event, ToolCallStarted)]
        assert names == [tool for tool, _ in calls][: len(names)]
        for index in range(len(names)):
            pieces = [event.text for event in events if isinstance(event, ToolCallArguments) and event.index == index]
            assert _squeezed(whole[index]).startswith(_squeezed("".join(pieces)).rstrip("\\")), text[:length]


def _squeezed(text: str) -> str:
    return text.replace(" ", "")


@pytest.mark.parametrize(
    ("family", "schema", "reason"),
    [
        ("pythonic", {"properties": {"first name": {}}}, "its parameter 'first name' is no name"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "'a' is a text here, which only"),
        ("qwen3_coder", {"properties": {"a": {"type": ["string", "array"]}}}, "may be a text, a list or an object"),
        ("qwen3_coder", {"properties": {"a": {"enum": ["1", 1]}}}, "would be read as something else"),
        ("glm45", {"properties": {"a>": {}}}, "its parameter 'a>' is no name"),
        ("minimax_m2", {"properties": {}, "required": ["a"]}, "requires a parameter that is not in properties"),
        ("gemma4", {"properties": {"a": {"type": "string", "minLength": 1}}}, "that this family's syntax cannot hold"),
        ("gemma4", {"properties": {"a": {}}}, "that this family's syntax cannot hold"),
        ("step3", {"properties": {}, "anyOf": [{}]}, "not all in properties"),
    ],
)
def test_a_schema_that_a_syntax_cannot_hold_is_refused_by_the_tools_name(
    family: str, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match="tool f cannot be strict here: ") as refusal:
        chosen_call_guide(family, [Tool(name="f", strict=True, parameters=schema)])
    assert reason in str(refusal.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_schemas_cost_no_more_than_their_size(family: str) -> None:
    """References that lead to themselves and to each other many times."""
    ways = [{"$ref": f"#/$defs/d{number}"} for number in range(12)]
    nested = {"type": "object", "properties": {name: {"$ref": "#/$defs/tree"} for name in "abcdef"}}
    properties = {"a": {"$ref": "#/$defs/d0"}, "b": {"$ref": "#/$defs/tree"}}
    defs = {**{f"d{number}": {"anyOf": ways} for number in range(12)}, "tree": nested}
    tool = Tool(name="f", strict=True, parameters={"properties": properties, "required": ["a"], "$defs": defs})
    is_held = True
    try:
        chosen_call_guide(family, [tool])
    except InvalidRequest as error:
        is_held = False
        assert "tool f cannot be strict here" in str(error)
    parser = make_tool_parser(family, [tool])
    text = written(family, [("f", {"a": 1})])
    assert any(isinstance(event, ToolCallStarted) for event in [*parser.feed(text), *parser.finish()])
    takes_any = not WRITINGS[family].argument and not WRITINGS[family].quote
    assert is_held is (takes_any or family in ("deepseek_v32", "deepseek_v4"))


@pytest.mark.parametrize(
    ("written_value", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("True", {"type": "boolean"}, True),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("nullable", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "nullable"),
        ("12", {"type": ["string", "integer"]}, 12),
        ("1.5", {"type": ["string", "integer"]}, "1.5"),
        ("many", {"type": "integer"}, "many"),
        ('{"a": ["<b>", "\\"</parameter>"]}', {"type": "object"}, {"a": ["<b>", '"</parameter>']}),
        ("[1, 2]", {}, [1, 2]),
        ("\n two lines\n", {"type": "string"}, "\n two lines\n"),
        ("", {"type": "string"}, ""),
        ("x <param> </para", {}, "x <param> </para"),
    ],
)
def test_a_value_between_tags_is_what_its_schema_says(written_value: str, schema: dict[str, Any], value: Any) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written_value}\n</parameter>\n</function>\n</tool_call>"
    tool = Tool(name="f", parameters={"properties": {"a": schema}})
    for pieces in ([text], list(text)):
        parser = make_tool_parser("qwen3_coder", [tool])
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        arguments = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert json.loads(arguments) == {"a": value}


def test_the_models_id_is_kept_where_its_template_needs_it() -> None:
    parser = make_tool_parser("kimi_k2", TOOLS)
    events = parser.feed(written("kimi_k2", [("stop", {}), ("stop", {})]))
    assert [event.id for event in events if isinstance(event, ToolCallStarted)] == [
        "functions.stop:0",
        "functions.stop:1",
    ]


@pytest.mark.parametrize(
    ("family", "tags"),
    [
        ("hermes", {"<tool_call>", "</tool_call>"}),
        ("mistral", {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
        ("pythonic", {"<|python_start|>", "<|python_end|>"}),
        ("gemma4", {"<|tool_call>", "<tool_call|>", '<|"|>'}),
        ("deepseek_v32", {"｜DSML｜"}),
        ("kimi_k2", {"<|tool_call_begin|>", "<|tool_call_argument_begin|>"}),
        ("glm45", {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}),
    ],
)
def test_what_may_be_special_tokens_is_known(family: str, tags: set[str]) -> None:
    assert tags <= syntax_of(family).tags()


def test_every_family_is_written_here() -> None:
    assert {*FAMILIES} <= {*map(parser_of, WRITINGS)}
    assert {*ALIASES.values()} <= {*FAMILIES} and not {*ALIASES} & {*FAMILIES}
