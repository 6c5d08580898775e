"""Calls of tools as the models of each family write them, apart from the descriptions of the syntaxes."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

Calls = list[tuple[str, dict[str, Any]]]


class Writing(NamedTuple):
    call: str
    """With NAME, NUMBER and the arguments: JSON, TEXT (JSON in a JSON text), PYTHON, BARE or TAGGED."""
    begin: str = ""
    between: str = ""
    end: str = ""
    argument: str = ""
    """Of TAGGED: with KEY and VALUE; a second one for values that are no texts may stand behind a line of dashes."""
    quote: str = ""
    """Around texts in BARE."""


_NAMED_JSON = '{"name": "NAME", "arguments": JSON}'
WRITINGS = {
    "hermes": Writing(f"<tool_call>\n{_NAMED_JSON}\n</tool_call>", between="\n"),
    "granite4": Writing('<tool_call>\n{"name": "NAME", "arguments": TEXT}\n</tool_call>', between="\n"),
    "qwen3_coder": Writing(
        "<tool_call>\n<function=NAME>\nTAGGED</function>\n</tool_call>",
        between="\n",
        argument="<parameter=KEY>\nVALUE\n</parameter>\n",
    ),
    "llama3_json": Writing('{"name": "NAME", "parameters": JSON}', between="; "),
    "pythonic": Writing("NAME(PYTHON)", begin="[", between=", ", end="]"),
    "mistral": Writing("[TOOL_CALLS]NAME[ARGS]JSON"),
    "mistral, version 3": Writing(_NAMED_JSON, begin="[TOOL_CALLS] [", between=", ", end="]"),
    "mistral, version 11": Writing("[TOOL_CALLS]NAMEJSON"),
    "deepseek_v3": Writing(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Writing(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": Writing(
        '<｜DSML｜invoke name="NAME">\nTAGGED</｜DSML｜invoke>\n',
        begin="<｜DSML｜function_calls>\n",
        end="</｜DSML｜function_calls>",
        argument='<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\n---'
        '<｜DSML｜parameter name="KEY" string="false">VALUE</｜DSML｜parameter>\n',
    ),
    "deepseek_v4": Writing(
        '<｜DSML｜invoke name="NAME">\nTAGGED</｜DSML｜invoke>\n',
        begin="<｜DSML｜tool_calls>\n",
        end="</｜DSML｜tool_calls>",
        argument='<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\n---'
        '<｜DSML｜parameter name="KEY" string="false">VALUE</｜DSML｜parameter>\n',
    ),
    "kimi_k2": Writing(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "glm45": Writing(
        "<tool_call>NAME\nTAGGED</tool_call>",
        between="\n",
        argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    "glm47": Writing(
        "<tool_call>NAMETAGGED</tool_call>", argument="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
    ),
    "minimax_m2": Writing(
        '<invoke name="NAME">\nTAGGED</invoke>\n',
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        argument='<parameter name="KEY">VALUE</parameter>\n',
    ),
    "granite": Writing(_NAMED_JSON, begin="<|tool_call|>[", between=", ", end="]"),
    "functiongemma": Writing("<start_function_call>call:NAME{BARE}<end_function_call>", quote="<escape>"),
    "gemma4": Writing("<|tool_call>call:NAME{BARE}<tool_call|>", quote='<|"|>'),
    "phi4_mini_json": Writing(_NAMED_JSON, begin="functools[", between=", ", end="]"),
    "lfm2": Writing("NAME(PYTHON)", begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>"),
    "olmo3": Writing("NAME(PYTHON)", begin="<function_calls>", between="\n", end="</function_calls>"),
    "nemotron": Writing(_NAMED_JSON, begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>"),
    "xlam": Writing(_NAMED_JSON, begin="[", between=", ", end="]"),
    "hunyuan_a13b": Writing(_NAMED_JSON, begin="<tool_calls>[", between=", ", end="]</tool_calls>"),
    "seed_oss": Writing(
        "<seed:tool_call>\n<function=NAME>\nTAGGED</function>\n</seed:tool_call>",
        between="\n",
        argument="<parameter=KEY>VALUE</parameter>\n",
    ),
    "step3": Writing(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">TAGGED</steptml:invoke>'
        "<｜tool_call_end｜>",
        begin="<｜tool_calls_begin｜>\n",
        between="\n",
        end="\n<｜tool_calls_end｜>",
        argument='<steptml:parameter name="KEY">VALUE</steptml:parameter>',
    ),
    "internlm": Writing('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": JSON}<|action_end|>'),
    "longcat": Writing(f"<longcat_tool_call>\n{_NAMED_JSON}\n</longcat_tool_call>", between="\n"),
    "harmony": Writing(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>",
        between="<|start|>assistant",
    ),
    "json": Writing('{"name": "NAME", "parameters": JSON}', begin="[", between=", ", end="]"),
}
"""By the parser's name; behind a comma, another of the ways in which its models write."""


def parser_of(name: str) -> str:
    return name.split(",")[0]


def written(name: str, calls: Calls) -> str:
    """Calls as a model writes them."""
    writing = WRITINGS[name]
    texts = [_call(writing, tool, arguments, number) for number, (tool, arguments) in enumerate(calls)]
    return writing.begin + writing.between.join(texts) + writing.end


def tame(name: str, calls: Calls) -> Calls:
    """Calls that are like these, with arguments that the family can write: where texts stand as they are, a text has no
    tag and is no number, and keys are names."""
    writing = WRITINGS[name]
    return [(tool, {key: _tame(writing, value) for key, value in arguments.items()}) for tool, arguments in calls]


def _call(writing: Writing, tool: str, arguments: dict[str, Any], number: int) -> str:
    as_json = json.dumps(arguments, ensure_ascii=False)
    ways = {
        "NAME": tool,
        "NUMBER": str(number),
        "JSON": as_json,
        "TEXT": json.dumps(as_json),
        "PYTHON": ", ".join(f"{key}={value!r}" for key, value in arguments.items()),
        "BARE": _bare(arguments, writing.quote)[1:-1],
        "TAGGED": "".join(_argument(writing.argument or "VALUE", key, value) for key, value in arguments.items()),
    }
    text = writing.call
    parts = sorted((text.index(way), way) for way in ways if way in text)
    found, position = "", 0
    for place, way in parts:
        found += text[position:place] + ways[way]
        position = place + len(way)
    return found + text[position:]


def _argument(shape: str, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    before, behind = shape.split("---")[0 if is_text else -1].split("VALUE")
    return before.replace("KEY", key) + (value if is_text else json.dumps(value)) + behind


def _bare(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_bare(inner, quote)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(inner, quote) for inner in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


def _tame(writing: Writing, value: Any) -> Any:
    if writing.quote:
        if isinstance(value, dict):
            return {f"k{number}": _tame(writing, inner) for number, inner in enumerate(value.values())}
        if isinstance(value, list):
            return [_tame(writing, inner) for inner in value]
    if isinstance(value, str) and (writing.quote or writing.argument):
        return "t" + value.replace("<", "")
    return value
