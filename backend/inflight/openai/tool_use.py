"""What a chat's body says of tools: which are offered, whether some must be called, and who finds the calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import msgspec

from inflight.errors import ConfigurationError, InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.openai.api_error import invalid
from inflight.openai.chat_format import ChatFormat
from inflight.openai.fields import AllowedToolChoice, ChatBody, FunctionTool, NamedToolChoice
from inflight.openai.guides import answer_form
from inflight.openai.tools.chosen_guide import chosen_call_guide
from inflight.openai.tools.families import ALIASES, FORCED, MODEL_TYPES, syntax_of
from inflight.openai.tools.forms import Form
from inflight.openai.tools.guide import forced_call_guide
from inflight.openai.tools.message_guide import forced_message_guide
from inflight.openai.tools.parser import make_tool_parser, new_id_maker
from inflight.openai.tools.tool import Tool, validate_tools
from inflight.text.safe_text import safe_text

CheckText = Callable[[str, GuidedDecodingParams, str], None]
"""Takes what it is, for the log, its guide, and itself."""
MODES = ("none", "auto", "required")
MESSAGES = "harmony"
"""The reasoning parser of outputs that are messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Of one call."""

    tools: list[Tool]
    definitions: list[dict[str, Any]]
    """The same as chat templates take them."""
    parser: str = ""
    """What finds calls in the output; "" = all of it is content."""
    family: str = ""
    """Whose chat template reads the calls' ids; "" = unknown."""
    guide: GuidedDecodingParams | None = None
    """The grammar of calls that must be made; or of those that may be, and of an answer in their place. None = calls
    are written without one."""
    is_forced: bool = False
    """Whether there must be a call."""
    has_answer_form: bool = False
    """Whether the grammar is also that of an answer, of which calls are no part."""
    is_named: bool = False
    keeps_one_call: bool = False

    def format(self, check_text: CheckText | None = None) -> ChatFormat:
        """How choices are read, as far as tools go. `check_text`: holds the arguments of calls against the schemas that
        a grammar has held them to."""
        if not self.parser:
            return ChatFormat()
        return ChatFormat(
            make_tool_parser=functools.partial(
                make_tool_parser,
                self.parser,
                self.tools,
                new_id_maker(self.family),
                at_start_only=self.has_answer_form,
                is_forced=self.is_forced,
            ),
            calls_are_all=self.is_forced,
            keeps_one_call=self.keeps_one_call,
            calls_are_a_reason=not self.is_named,
            check_call=None if check_text is None or self.guide is None else self._check_of_calls(check_text),
        )

    def _check_of_calls(self, check_text: CheckText) -> Callable[[str, str], None]:
        """Calls of a tool that is not strict may leave out what cannot be enforced: they are checked to be JSON."""
        schemas = {
            tool.name: GuidedDecodingParams(
                guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(tool.schema), is_strict=tool.strict
            )
            for tool in self.tools
            if tool.strict or self.is_forced
        }

        def check(name: str, arguments: str) -> None:
            if name in schemas:
                check_text(f"a call of the tool {name}", schemas[name], arguments)

        return check


def choose_tool_parser(asked: str, families: list[str], *, knows_tools: bool, model_type: str = "") -> tuple[str, str]:
    """The family whose calls are read, "" = none, and what the operator is told of it. `asked`: by the operator.
    `families`: those whose calls the chat template writes. `model_type`: of the checkpoint."""
    setting = "--openai-set tool_parser"
    if asked:
        differs = f"the chat template writes calls of tools as {' and '.join(families)}, but {setting} is {asked}"
        return asked, differs if families and ALIASES.get(asked, asked) not in families else ""
    if len(families) == 1:
        known = f"calls of tools are read as {families[0]}, as the chat template writes them"
        return families[0], f"{known}; {setting}=… names another family"
    if not families and model_type in MODEL_TYPES:
        family = MODEL_TYPES[model_type]
        return (
            family,
            f"calls of tools are read as {family}, as {model_type} writes them; {setting}=… names another family",
        )
    if not knows_tools:
        return "", ""
    writes = f"as each of {', '.join(families)}" if families else "as no family that is known here"
    return "", f"tool_choice auto is refused: the chat template writes calls of tools {writes}; {setting}=… names one"


def choose_reasoning_parser(asked: str, tool_parser: str) -> str:
    """The family by which reasoning is found, "" = none. Where all output is messages, calls and reasoning are found by
    the same headers. `asked`: by the operator. Raises ConfigurationError if it does not go with the tools' parser."""
    in_messages = bool(tool_parser) and syntax_of(tool_parser).in_messages
    if asked and in_messages is not (asked == MESSAGES):
        needs = f"goes with tool_parser {MESSAGES} alone" if asked == MESSAGES else f"does not go with {tool_parser}"
        raise ConfigurationError(f"reasoning_parser {asked} {needs}")
    return asked or (MESSAGES if in_messages else "")


def read_tools(
    body: ChatBody, family: str, special_tokens: Container[str] = (), *, knows_tools: bool = True
) -> ToolUse | None:
    """None without tools. `family`: whose calls the model writes, "" = unknown. `special_tokens`: of the checkpoint.
    `knows_tools`: whether its chat template tells the model of tools. Raises APIError."""
    choice = body.tool_choice
    name: str | None = None
    if isinstance(choice, str) and choice not in MODES:
        raise invalid(f"tool_choice must be one of {', '.join(MODES)}, or name functions", "tool_choice")
    if body.tools is None:
        if choice not in (None, "none"):
            raise invalid("tool_choice is only allowed when tools are specified", "tool_choice")
        return None
    if not body.tools:
        raise invalid("tools is empty: give at least one, or leave it out", "tools")
    tools, definitions = read_definitions(body.tools)
    mode, offered = choice if isinstance(choice, str) else "auto", tools
    if isinstance(choice, NamedToolChoice):
        mode, name = "required", choice.function.name
        offered = [tool for tool in tools if tool.name == name]
    elif isinstance(choice, AllowedToolChoice):
        mode, offered = choice.allowed_tools.mode, _allowed(choice, tools)
    use = functools.partial(ToolUse, tools=offered, definitions=definitions, family=family)
    one = body.parallel_tool_calls is False
    if mode == "none":
        return use()
    if mode == "auto":
        _check_may_choose(family, knows_tools=knows_tools)
        answer = answer_form(body.response_format)
        is_held = len(offered) < len(tools) or any(tool.strict for tool in offered)
        guide = _chosen_calls(body, family, offered, special_tokens, answer) if is_held or answer is not None else None
        return use(parser=family, guide=guide, has_answer_form=answer is not None, keeps_one_call=one)
    in_messages = bool(family) and syntax_of(family).in_messages
    force = forced_message_guide if in_messages else forced_call_guide
    try:
        guide = force(offered, name=name, parallel_tool_calls=not one)
    except InvalidRequest as error:
        raise invalid(str(error), "tool_choice") from None
    parser = family if in_messages else FORCED
    return use(parser=parser, guide=guide, is_forced=True, is_named=name is not None)


def read_definitions(given: list[FunctionTool]) -> tuple[list[Tool], list[dict[str, Any]]]:
    """The tools, and what chat templates take. Raises APIError."""
    functions = [each.function for each in given]
    tools = [
        Tool(
            name=each.name,
            description=each.description or "",
            parameters=each.parameters,
            strict=bool(each.strict),
        )
        for each in functions
    ]
    try:
        validate_tools(tools)
    except InvalidRequest as error:
        raise invalid(str(error), "tools") from None
    return tools, msgspec.to_builtins(given)


def _allowed(choice: AllowedToolChoice, tools: list[Tool]) -> list[Tool]:
    names = [each.function.name for each in choice.allowed_tools.tools]
    if not names:
        raise invalid("tool_choice.allowed_tools.tools is empty: give at least one", "tool_choice")
    for name in names:
        if name not in {tool.name for tool in tools}:
            raise invalid(f"tool_choice allows the tool {safe_text(name)}, which is not in tools", "tool_choice")
    return [tool for tool in tools if tool.name in names]


def _check_may_choose(family: str, *, knows_tools: bool) -> None:
    """Whether a model that may choose would call, and its calls would be found."""
    if not knows_tools:
        raise invalid("the checkpoint's chat template tells the model of no tools: use tool_choice required", "tools")
    if not family:
        raise invalid(
            "tool_choice auto needs the operator's setting tool_parser, which says how this model writes calls; "
            "required and a named function work without it",
            "tool_choice",
            "unsupported_parameter",
        )


def _chosen_calls(
    body: ChatBody, family: str, tools: list[Tool], special_tokens: Container[str], answer: Form | None
) -> GuidedDecodingParams:
    """The grammar of calls that may be made: of these tools alone, in the place of an `answer` in a form of its own."""
    several = body.parallel_tool_calls is not False
    try:
        return chosen_call_guide(
            family, tools, special_tokens=special_tokens, parallel_tool_calls=several, answer=answer
        )
    except InvalidRequest as error:
        raise invalid(str(error), "tools") from None
