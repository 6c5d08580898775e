"""What a chat's body says of tools: which are offered, whether some must be called, and who finds the calls."""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import msgspec

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams
from inflight.openai.api_error import invalid
from inflight.openai.chat_format import ChatFormat
from inflight.openai.fields import ChatBody, FunctionTool, NamedToolChoice
from inflight.openai.guides import answer_form
from inflight.openai.tools.chosen_guide import chosen_call_guide
from inflight.openai.tools.guide import Form, forced_call_guide
from inflight.openai.tools.parser import FORCED, make_tool_parser, new_id_maker
from inflight.openai.tools.tool import Tool, validate_tools

MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Of one call."""

    tools: list[Tool]
    definitions: list[dict[str, Any]]
    """The same as chat templates take them."""
    parser: str = ""
    """What finds calls in the output; "" = all of it is content."""
    family: str = ""
    """The operator's parser, whose chat template reads the calls' ids; "" = none."""
    guide: GuidedDecodingParams | None = None
    """The grammar of calls that must be made; or of those that may be, and of an answer in their place. None = calls
    are written without one."""
    is_forced: bool = False
    """Whether there must be a call."""
    has_answer_form: bool = False
    """Whether the grammar is also that of an answer, of which calls are no part."""
    is_named: bool = False
    keeps_one_call: bool = False

    def format(self) -> ChatFormat:
        """How choices are read, as far as tools go."""
        if not self.parser:
            return ChatFormat()
        return ChatFormat(
            make_tool_parser=functools.partial(
                make_tool_parser,
                self.parser,
                self.tools,
                new_id_maker(self.family),
                at_start_only=self.has_answer_form,
            ),
            calls_are_all=self.is_forced,
            keeps_one_call=self.keeps_one_call,
            calls_are_a_reason=not self.is_named,
        )


def read_tools(body: ChatBody, family: str, special_tokens: Container[str] = ()) -> ToolUse | None:
    """None without tools. `family`: the operator's parser, "" = none. `special_tokens`: of the checkpoint. Raises
    APIError."""
    choice = body.tool_choice
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if name is None and choice not in (None, *MODES):
        raise invalid(f"tool_choice must be one of {', '.join(MODES)}, or name a function", "tool_choice")
    if body.tools is None:
        if choice not in (None, "none"):
            raise invalid("tool_choice is only allowed when tools are specified", "tool_choice")
        return None
    if not body.tools:
        raise invalid("tools is empty: give at least one, or leave it out", "tools")
    tools, definitions = read_definitions(body.tools)
    use = functools.partial(ToolUse, tools=tools, definitions=definitions, family=family)
    one = body.parallel_tool_calls is False
    if choice == "none":
        return use()
    if choice in (None, "auto"):
        answer = answer_form(body.response_format)
        guide = _chosen_calls(body, family, tools, special_tokens, answer)
        return use(parser=family, guide=guide, has_answer_form=answer is not None, keeps_one_call=one)
    try:
        guide = forced_call_guide(tools, name=name, parallel_tool_calls=not one)
    except InvalidRequest as error:
        raise invalid(str(error), "tool_choice") from None
    return use(parser=FORCED, guide=guide, is_forced=True, is_named=name is not None)


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


def _chosen_calls(
    body: ChatBody, family: str, tools: list[Tool], special_tokens: Container[str], answer: Form | None
) -> GuidedDecodingParams | None:
    """The grammar of tool_choice auto: without a strict tool, and without an `answer` in a form of its own, none."""
    if not family:
        raise invalid(
            "tool_choice auto needs the operator's setting tool_parser, which says how this model writes calls; "
            "required and a named function work without it",
            "tool_choice",
            "unsupported_parameter",
        )
    if answer is None and not any(tool.strict for tool in tools):
        return None
    several = body.parallel_tool_calls is not False
    try:
        return chosen_call_guide(
            family, tools, special_tokens=special_tokens, parallel_tool_calls=several, answer=answer
        )
    except InvalidRequest as error:
        raise invalid(str(error), "tools") from None
