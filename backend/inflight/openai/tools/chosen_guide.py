"""The grammar of tool_choice auto with strict tools: text is free until a call begins, which its tool's schema rules.

For each family the calls as its chat templates have them, and of what its parser takes for the beginning of a call
nothing else: what is found in the text always follows the schema of its tool. The arguments of a tool that is not
strict are any object. Instead of free text there may be an answer in a form of its own, that of response_format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams
from inflight.openai.tools.call_machine import CallMachine
from inflight.openai.tools.guide import Form, call_list, guide_of, json_call, schema_of, separated, tag
from inflight.openai.tools.hermes import HermesParser
from inflight.openai.tools.llama3_json import Llama3JsonParser
from inflight.openai.tools.mistral import ARGUMENTS_TAG, ID_TAG
from inflight.openai.tools.parser import PARSERS
from inflight.openai.tools.pythonic import PythonicParser
from inflight.openai.tools.tool import Tool

SPACE: Form = {"type": "regex", "pattern": r"[ \t\n\r]{0,8}"}
ANY_OBJECT: Form = {"type": "object", "additionalProperties": True}
KEYWORD: Form = {"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]{0,63}"}
BEYOND_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
"""What a schema may say of arguments besides naming them one by one."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Of one family."""

    behind_tag: Form
    """What follows the tag that begins calls, anywhere in the text."""
    separator: str | None = None
    """What stands between that and the next tag; None = nothing follows."""
    whole: Form | None = None
    """A text that is calls alone, with a tag or without; None = the family needs the tag."""


def chosen_call_guide(
    family: str,
    tools: list[Tool],
    *,
    special_tokens: Container[str] = (),
    parallel_tool_calls: bool = True,
    answer: Form | None = None,
) -> GuidedDecodingParams:
    """`special_tokens`: of the checkpoint, by which it is known which of two formats a model of Mistral writes.
    `answer`: what the text without calls follows, None = it is free. Raises InvalidRequest if the grammar is beyond the
    engine's bounds, or if the family cannot write such arguments."""
    is_one = not parallel_tool_calls
    calls, parser = FAMILIES[family](tools, special_tokens, is_one), PARSERS[family]
    if answer is None:
        return guide_of(_free(calls, parser, is_one), "a strict tool")
    return guide_of(_instead_of(answer, calls, parser.tag, is_one), "response_format together with tools")


def _free(calls: Calls, parser: type[CallMachine], is_one: bool) -> Form:
    goes_on = calls.separator is not None and not is_one
    text: Form = {"type": "dispatch", "rules": [[parser.tag, calls.behind_tag]], "loop": goes_on}
    if calls.whole is None:
        return text
    # The first character decides whether the text is calls. The tag may begin it, too.
    first, second = re.escape(parser.tag[0]), re.escape(parser.tag[1])
    other = rf"[^ \t\n\r{re.escape(parser.opening)}{first}]|{first}[^{first}{second}]"
    free = _sequence({"type": "regex", "pattern": other}, text)
    return _sequence(SPACE, _optional(_either(calls.whole, free)))


def _instead_of(answer: Form, calls: Calls, tag: str, is_one: bool) -> Form:
    whole = calls.whole or _sequence(_text(tag), calls.behind_tag)
    if calls.separator is not None and not is_one:
        whole = _several(whole, calls.separator)
    return _sequence(SPACE, _either(answer, whole))


def _arguments(tool: Tool) -> Form:
    return schema_of(tool.schema if tool.strict else ANY_OBJECT)


def _hermes(tools: list[Tool], special_tokens: Container[str], is_one: bool) -> Calls:
    calls = [json_call(tool, "arguments", _arguments(tool)) for tool in tools]
    end = _text(f"\n{HermesParser.closing_tag}")
    return Calls(behind_tag=_sequence(_text("\n"), _either(*calls), end), separator="\n")


def _llama3_json(tools: list[Tool], special_tokens: Container[str], is_one: bool) -> Calls:
    calls = separated([json_call(tool, "parameters", _arguments(tool)) for tool in tools], "; ", is_one=is_one)
    return Calls(behind_tag=calls, whole=_sequence(_optional(_text(Llama3JsonParser.tag)), calls))


def _pythonic(tools: list[Tool], special_tokens: Container[str], is_one: bool) -> Calls:
    calls = call_list([tag(f"{tool.name}(", _keywords(tool), ")") for tool in tools], is_one=is_one)
    begin, end = _text(PythonicParser.tag), _text(PythonicParser.closing_tag)
    whole = _sequence(_optional(begin), calls, _optional(end))
    return Calls(behind_tag=_sequence(calls, end), whole=whole)


def _mistral(tools: list[Tool], special_tokens: Container[str], is_one: bool) -> Calls:
    if ARGUMENTS_TAG not in special_tokens:
        calls = call_list([json_call(tool, "arguments", _arguments(tool)) for tool in tools], is_one=is_one)
        return Calls(behind_tag=_sequence({"type": "regex", "pattern": " ?"}, calls))
    call_id = _sequence(_text(ID_TAG), {"type": "regex", "pattern": "[a-zA-Z0-9]{9}"})
    before = [_optional(call_id)] if ID_TAG in special_tokens else []
    calls = _either(*(_sequence(_text(tool.name), *before, tag(ARGUMENTS_TAG, _arguments(tool))) for tool in tools))
    return Calls(behind_tag=calls, separator="")


def _keywords(tool: Tool) -> Form:
    """Arguments as Python has them, with values as JSON has them: the parser takes these. Required ones come first."""
    if not tool.strict:
        one = _sequence(KEYWORD, _text("="), {"type": "json_schema", "json_schema": True})
        return _optional(_several(one, ", "))
    schema = tool.schema
    properties = schema["properties"]
    for name in properties:
        if not name.isidentifier():
            raise InvalidRequest(f"tool {tool.name} cannot be strict here: its parameter {name[:64]!r} is no name")
    for key in BEYOND_PROPERTIES:
        if key in schema:
            raise InvalidRequest(f"tool {tool.name} cannot be strict here: its parameters are not all in properties")
    required = [name for name in properties if name in schema.get("required", ())]
    others = [name for name in properties if name not in required]
    shared: Form = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def argument(name: str) -> Form:
        own = properties[name]
        return _sequence(_text(f"{name}="), schema_of({**shared, **own} if isinstance(own, dict) else own))

    def further(name: str) -> Form:
        return _sequence(_text(", "), argument(name))

    if required:
        first, *rest = required
        return _sequence(argument(first), *map(further, rest), *(_optional(further(name)) for name in others))
    cases = [
        _sequence(argument(name), *(_optional(further(later)) for later in others[place + 1 :]))
        for place, name in enumerate(others)
    ]
    return _optional(_either(*cases)) if cases else _text("")


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Form) -> Form:
    return {"type": "or", "elements": list(elements)}


def _several(form: Form, separator: str) -> Form:
    """One or more."""
    return _sequence(form, {"type": "star", "content": _sequence(_text(separator), form)})


def _optional(content: Form) -> Form:
    return {"type": "optional", "content": content}


FAMILIES: dict[str, Callable[[list[Tool], Container[str], bool], Calls]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "pythonic": _pythonic,
    "mistral": _mistral,
}
"""What makes the calls of each: of its tools, the checkpoint's special tokens, and whether there is only one call."""
