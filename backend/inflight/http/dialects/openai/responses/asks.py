"""Bodies of requests for a response as what their clients want of the model."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from inflight.asking.ask import Ask
from inflight.asking.chat import Chat
from inflight.asking.guide import object_guide, schema_guide
from inflight.asking.limit import Limit
from inflight.asking.refusal import Words
from inflight.asking.show import Show, output_config
from inflight.asking.stop import Stop
from inflight.asking.tool_choice import ToolChoice
from inflight.asking.tools.tool import Tool
from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.messages import read_messages
from inflight.http.dialects.openai.asks import WORDS, make_ask
from inflight.http.dialects.openai.guides import Found
from inflight.http.dialects.openai.responses.conversation import chat_messages
from inflight.http.dialects.openai.responses.fields import AllowedFunctions, NamedFunction, ResponseBody
from inflight.http.dialects.openai.responses.items import Item, read_struct
from inflight.lora import LoRARequest
from inflight.request_limits import RequestLimits
from inflight.text.safe_text import safe_text

NO_OWN_TOOLS = "this engine runs no tools of its own, it calls functions of the client"
OF_RESPONSE = {
    **WORDS,
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "log_probs": "top_logprobs",
    "tool_choice.allowed": "tool_choice.tools",
}
"""Field of an `Ask` -> where a response has it."""


def response_ask(
    body: ResponseBody, chat: Chat, limits: RequestLimits, adapter: LoRARequest | None, *, keeps_token_ids: bool
) -> tuple[Ask, Words]:
    """`chat`: see `response_chat`. `keeps_token_ids`: for the answer's own sake. Raises APIError."""
    return make_ask(
        body,
        limits,
        OF_RESPONSE,
        _format(body),
        prompt=chat,
        adapter=adapter,
        limit=Limit(max_tokens=body.max_output_tokens, allotted_time_ms=body.allotted_time_ms),
        stop=Stop(token_ids=body.stop_token_ids or (), ends_by_itself=not body.ignore_eos),
        show=Show(
            output=output_config(body.top_logprobs or 0 if body.wants_log_probs else None),
            token_ids=keeps_token_ids,
            special_tokens=body.skip_special_tokens is False,
        ),
    )


def response_chat(body: ResponseBody, items: list[Item]) -> Chat:
    """`items`: of the whole conversation. Raises APIError."""
    tools = [_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or ())]
    return Chat(
        messages=read_messages(chat_messages(items, body.instructions)),
        # Unlike in a chat, an empty list is a usual way to say that there are none.
        tools=tools or None,
        tool_choice=_tool_choice(body, has_tools=bool(tools)),
        template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )


def _format(body: ResponseBody) -> Found | None:
    given, field = body.text.format if body.text is not None else None, "text.format"
    if given is None:
        return None
    if given.type == "json_schema":
        if given.name is None or given.schema is None:
            raise invalid("text.format of type json_schema needs a name and a schema", field)
        return Found(field, schema_guide(given.schema, is_strict=given.strict is not False))
    if any(value is not None for name, value in structs.asdict(given).items() if name != "type"):
        raise invalid(f"text.format of type {given.type} has no other fields", field)
    return Found(field, object_guide()) if given.type == "json_object" else None


def _tool(given: dict[str, Any], where: str) -> Tool:
    if given.get("type") != "function":
        raise unsupported(f"{where}.type", f"{safe_text(str(given.get('type')))} is no function: {NO_OWN_TOOLS}")
    # What chat completions have in `function` stands beside its type.
    said = {name: value for name, value in given.items() if value is not None and name != "type"}
    return read_struct(said, Tool, where)


def _tool_choice(body: ResponseBody, *, has_tools: bool) -> ToolChoice:
    given, is_parallel = body.tool_choice, body.parallel_tool_calls is not False
    if given is None or isinstance(given, str):
        mode = "" if given is None or (given == "auto" and not has_tools) else given
        return ToolChoice(mode=mode, is_parallel=is_parallel)
    if given.get("type") == "function":
        name = read_struct(given, NamedFunction, "tool_choice").name
        return ToolChoice(mode="required", name=name, is_parallel=is_parallel)
    if given.get("type") == "allowed_tools":
        allowed = read_struct(given, AllowedFunctions, "tool_choice")
        return ToolChoice(mode=allowed.mode, allowed=[each.name for each in allowed.tools], is_parallel=is_parallel)
    kind = safe_text(str(given.get("type")))
    raise unsupported("tool_choice.type", f"{kind} is no function: {NO_OWN_TOOLS}, those that the request offers")
