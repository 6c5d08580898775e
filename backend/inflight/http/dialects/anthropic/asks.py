"""Bodies of requests for a message as what their clients want of the model."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.asking.ask import Ask
from inflight.asking.chat import Chat
from inflight.asking.chats import Chats
from inflight.asking.guide import Guide, schema_guide
from inflight.asking.limit import Limit
from inflight.asking.show import Show
from inflight.asking.stop import Stop
from inflight.asking.tool_choice import ToolChoice
from inflight.asking.tools.tool import Tool
from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.anthropic.conversation import calls_are_open, chat_messages, read_struct
from inflight.http.dialects.anthropic.fields import CUSTOM_TOOL, CountBody, MessagesBody, check_body
from inflight.http.dialects.messages import read_messages
from inflight.lora import LoRARequest
from inflight.sampling import Sampling
from inflight.text.safe_text import safe_text

WORDS = {
    "prompt": "messages",
    "adapter": "model",
    "reasoning_effort": "output_config.effort",
    "guide": "output_config.format",
    "shows_reasoning": "thinking",
    "tool_choice.allowed": "tool_choice",
}
"""Field of an `Ask` -> where a request for a message has it."""
MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class ToolParam(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Any = None
    """Without effect, as the next ones: calls are streamed, all tools are read, and only the model calls them."""
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[dict[str, Any]] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """With the examples, as JSON schemas have them."""
        return {**self.input_schema, **({"examples": self.input_examples} if self.input_examples else {})}


def message_ask(body: MessagesBody, chats: Chats, adapter: LoRARequest | None) -> Ask:
    """What the model thinks is shown to those who ask for it, where it can be told from the answer. Raises APIError."""
    is_shown = body.thinking is not None and body.thinking.is_shown
    return Ask(
        prompt=message_chat(body, chats),
        streaming=bool(body.stream),
        sampling=Sampling(is_random=True, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        # What does not fit into the context is no error: clients ask for all that the largest model can write.
        limit=Limit(default=body.max_tokens),
        stop=Stop(texts=body.stop_sequences or ()),
        guide=_guide(body),
        adapter=adapter,
        show=Show(reasoning=is_shown or not chats.splits_reasoning),
    )


def message_chat(body: CountBody, chats: Chats) -> Chat:
    """Raises APIError."""
    check_body(body)
    if not body.messages:
        raise invalid("messages is empty: give at least one", "messages")
    messages = read_messages(chat_messages(body.messages, body.system))
    if wrong := calls_are_open(messages):
        raise wrong
    thinking, settings = body.thinking, body.output_config
    return Chat(
        messages=messages,
        tools=[_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body),
        thinks=thinking is not None and thinking.type != "disabled",
        # A hint: agents give it to every model.
        reasoning_effort=settings.effort if settings is not None and chats.knows_effort else None,
        continues_final_message=messages[-1]["role"] == "assistant",
    )


def _guide(body: CountBody) -> Guide | None:
    given = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        given = body.output_config.format
    return None if given is None else schema_guide(given.schema, is_strict=True)


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind not in (None, CUSTOM_TOOL):
        raise unsupported(f"{where}.type", f"{safe_text(str(kind))} is a tool of Anthropic's own servers")
    tool = read_struct(given, ToolParam, where)
    return Tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _tool_choice(body: CountBody) -> ToolChoice:
    given = body.tool_choice
    if given is None:
        return ToolChoice()
    if (given.type == "tool") != (given.name is not None):
        raise invalid("tool_choice of type tool needs a name, and no other type has one", "tool_choice")
    return ToolChoice(mode=MODES[given.type], name=given.name, is_parallel=not given.disable_parallel_tool_use)
