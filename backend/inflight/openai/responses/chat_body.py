"""A request for a response as a request for a chat: the same fields under the names that chat completions have."""

from __future__ import annotations

import re
from typing import Any

from msgspec import structs

from inflight.openai.api_error import APIError, invalid, unsupported
from inflight.openai.fields import (
    AllowedToolChoice,
    AllowedTools,
    ChatBody,
    Function,
    FunctionName,
    FunctionTool,
    NamedToolChoice,
    OfferedFunction,
    TextBody,
)
from inflight.openai.responses.fields import (
    AllowedFunctions,
    FunctionDefinition,
    NamedFunction,
    ResponseBody,
    TextFormat,
)
from inflight.openai.responses.items import read_struct
from inflight.text.safe_text import safe_text

NO_OWN_TOOLS = "this engine runs no tools of its own, it calls functions of the client"
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat -> where a response has it."""
NAMES_IN_SENTENCES = ("response_format", "reasoning_effort")

_FUNCTION = re.compile(r"(tools\[\d+\])\.function\b")


def chat_body(body: ResponseBody, messages: list[dict[str, Any]], *, returns_token_ids: bool = False) -> ChatBody:
    """`messages`: of the whole conversation. Raises APIError."""
    shared = {name: getattr(body, name) for name in TextBody.__struct_fields__}
    tools = [_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or ())]
    return ChatBody(
        **shared,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_log_probs,
        top_logprobs=body.top_logprobs,
        response_format=_format(body.text.format if body.text is not None else None),
        # Unlike in a chat, an empty list is a usual way to say that there are none.
        tools=tools or None,
        tool_choice=_tool_choice(body.tool_choice, has_tools=bool(tools)),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        return_token_ids=returns_token_ids,
    )


def renamed(error: APIError) -> APIError:
    """An error about a chat's field, about the response's."""
    param, message = error.param, _FUNCTION.sub(r"\1", error.message)
    if param is not None:
        param = NAMES.get(param, _FUNCTION.sub(r"\1", param))
    for name in NAMES_IN_SENTENCES:
        message = message.replace(name, NAMES[name])
    return APIError(error.status, message, param=param, code=error.code, headers=error.headers)


def _format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None:
        return None
    named = {name: value for name, value in structs.asdict(given).items() if value is not None and name != "type"}
    if given.type == "json_schema":
        if given.name is None or given.schema is None:
            raise invalid("text.format of type json_schema needs a name and a schema", "text.format")
        return {"type": given.type, "json_schema": named}
    if named:
        raise invalid(f"text.format of type {given.type} has no other fields", "text.format")
    return {"type": given.type}


def _tool(given: dict[str, Any], where: str) -> FunctionTool:
    if given.get("type") != "function":
        raise unsupported(f"{where}.type", f"{safe_text(str(given.get('type')))} is no function: {NO_OWN_TOOLS}")
    found = read_struct({name: value for name, value in given.items() if value is not None}, FunctionDefinition, where)
    function = Function(found.name, found.description, found.parameters, found.strict)
    return FunctionTool("function", function)


def _tool_choice(
    given: str | dict[str, Any] | None, *, has_tools: bool
) -> str | NamedToolChoice | AllowedToolChoice | None:
    if given == "auto" and not has_tools:
        return None
    if given is None or isinstance(given, str):
        return given
    if given.get("type") == "function":
        return NamedToolChoice(FunctionName(read_struct(given, NamedFunction, "tool_choice").name))
    if given.get("type") == "allowed_tools":
        allowed = read_struct(given, AllowedFunctions, "tool_choice")
        named = [OfferedFunction(each.type, FunctionName(each.name)) for each in allowed.tools]
        return AllowedToolChoice(AllowedTools(allowed.mode, named))
    kind = safe_text(str(given.get("type")))
    raise unsupported("tool_choice.type", f"{kind} is no function: {NO_OWN_TOOLS}, those that the request offers")
