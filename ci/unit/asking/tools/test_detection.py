"""A chat template shows whose calls it writes, and a setting that names another family is told to the operator."""

from __future__ import annotations

import json

import pytest

from inflight.asking.chat_template import ChatTemplate
from inflight.asking.tool_use import choose_tool_parser
from inflight.asking.tools.detection import families_reading
from inflight.asking.tools.families import ALIASES, FAMILIES

SHELL = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ '<|start|>' + message.role + '<|sep|>' }}
{%- if message.tool_calls %}@BEGIN@{% for call in message.tool_calls %}{% set f = call.function %}@CALL@
{%- if not loop.last %}{{ "," }}{% endif %}{% endfor %}@END@
{%- else %}{{ message.content }}{% endif %}{{ '<|stop|>' }}{% endfor %}"""
"""A template whose calls are filled in."""
JSON = "{{ f.arguments | tojson }}"
NAMED = f"{{{{ '{{\"name\": \"' + f.name + '\", \"arguments\": ' }}}}{JSON}{{{{ '}}' }}}}"
PARAMETERS = NAMED.replace("arguments\": '", "parameters\": '")
PYTHON = "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})"


def each(argument: str) -> str:
    """Jinja that writes every argument so, with KEY and VALUE."""
    filled = argument.replace("KEY", "{{ k }}").replace("VALUE", "{{ v if v is string else v | tojson }}")
    return "{% for k, v in f.arguments.items() %}" + filled + "{% endfor %}"


def raw(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"


CALLS: dict[str, tuple[str, str, str]] = {
    "hermes": ("", f"{raw('<tool_call>')}{raw(chr(10))}{NAMED}{raw(chr(10) + '</tool_call>')}", ""),
    "qwen3_coder": (
        "",
        raw("<tool_call>\n<function=") + "{{ f.name }}" + raw(">\n")
        + each("<parameter=KEY>" + raw("\n") + "VALUE" + raw("\n</parameter>\n"))
        + raw("</function>\n</tool_call>"),
        "",
    ),
    "llama3_json": ("", PARAMETERS, ""),
    "pythonic": ("[", PYTHON, "]"),
    "mistral": ("", "[TOOL_CALLS]{{ f.name }}" + JSON, ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}" + raw("\n```json\n") + JSON
        + raw("\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": (
        raw("\n\n<｜DSML｜function_calls>\n"),
        '<｜DSML｜invoke name="{{ f.name }}">' + raw("\n")
        + each('<｜DSML｜parameter name="KEY" string="false">VALUE</｜DSML｜parameter>' + raw("\n"))
        + raw("</｜DSML｜invoke>\n"),
        "</｜DSML｜function_calls>",
    ),
    "deepseek_v4": (
        raw("\n\n<｜DSML｜tool_calls>\n"),
        '<｜DSML｜invoke name="{{ f.name }}">' + raw("\n")
        + each('<｜DSML｜parameter name="KEY" string="false">VALUE</｜DSML｜parameter>' + raw("\n"))
        + raw("</｜DSML｜invoke>\n"),
        "</｜DSML｜tool_calls>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "glm45": (
        "",
        raw("\n<tool_call>") + "{{ f.name }}" + raw("\n")
        + each("<arg_key>KEY</arg_key>" + raw("\n") + "<arg_value>VALUE</arg_value>" + raw("\n")) + "</tool_call>",
        "",
    ),
    "glm47": (
        "",
        "<tool_call>{{ f.name }}" + each("<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>") + "</tool_call>",
        "",
    ),
    "minimax_m2": (
        raw("<minimax:tool_call>\n"),
        '<invoke name="{{ f.name }}">' + raw("\n") + each('<parameter name="KEY">VALUE</parameter>' + raw("\n"))
        + raw("</invoke>\n"),
        "</minimax:tool_call>",
    ),
    "granite": ("<|tool_call|>[", NAMED, "]"),
    "functiongemma": (
        "",
        "<start_function_call>call:{{ f.name }}" + raw("{") + each("KEY:VALUE") + raw("}") + "<end_function_call>",
        "",
    ),
    "gemma4": ("", "<|tool_call>call:{{ f.name }}" + raw("{") + each("KEY:VALUE") + raw("}") + "<tool_call|>", ""),
    "phi4_mini_json": ("functools[", NAMED, "]"),
    "lfm2": ("<|tool_call_start|>[", PYTHON, "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>", PYTHON, "</function_calls>"),
    "nemotron": ("<TOOLCALL>[", NAMED, "]</TOOLCALL>"),
    "xlam": ("[", NAMED, "]"),
    "hunyuan_a13b": ("<tool_calls>[", NAMED, "]</tool_calls>"),
    "seed_oss": (
        "",
        raw("<seed:tool_call>\n<function=") + "{{ f.name }}" + raw(">\n")
        + each("<parameter=KEY>VALUE</parameter>" + raw("\n")) + raw("</function>\n</seed:tool_call>"),
        "",
    ),
    "step3": (
        raw("<｜tool_calls_begin｜>\n"),
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ f.name }}">'
        + each('<steptml:parameter name="KEY">VALUE</steptml:parameter>') + "</steptml:invoke><｜tool_call_end｜>",
        raw("\n<｜tool_calls_end｜>"),
    ),
    "internlm": ("<|action_start|><|plugin|>" + raw("\n"), PARAMETERS, "<|action_end|>"),
    "longcat": ("", f"<longcat_tool_call>{raw(chr(10))}{NAMED}{raw(chr(10))}</longcat_tool_call>", ""),
    "harmony": ("", " to=functions.{{ f.name }}<|channel|>commentary json<|message|>" + JSON + "<|call|>", ""),
}  # fmt: skip
"""What stands before the calls, a call, and what stands behind them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_names_the_family(family: str) -> None:
    begin, call, end = CALLS[family]
    source = SHELL.replace("@BEGIN@", begin).replace("@CALL@", call).replace("@END@", end)
    assert ChatTemplate(source, {}).tool_families == [family]


def test_text_around_a_call_decides_between_families_that_would_read_it() -> None:
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert families_reading(f"{call}<|stop|>", "f", {"a": 1}) == ["llama3_json"]
    assert families_reading(f"<tool_call>{call}</tool_call>", "f", {"a": 1}) == ["hermes"]
    assert families_reading(f"<unheard_of>{call}</unheard_of>", "f", {"a": 1}) == []
    assert families_reading("f(1)", "f", {"a": 1}) == []


@pytest.mark.parametrize("alias", ALIASES)
def test_another_name_of_the_templates_family_is_no_wrong_choice(alias: str) -> None:
    assert choose_tool_parser(alias, [ALIASES[alias]], knows_tools=True) == (alias, "")
    parser, said = choose_tool_parser(alias, ["kimi_k2"], knows_tools=True)
    assert parser == alias
    assert said == f"the chat template writes calls of tools as kimi_k2, but --openai-set tool_parser is {alias}"
