"""Messages with content blocks as the messages of a chat: what chat templates take.

    user       text and image blocks are one message; each tool_result is a message of its own, of role tool
    assistant  thinking, text and tool_use blocks are one message

Turns of one role that follow each other are one turn, as at Anthropic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from inflight.http.api_error import APIError, invalid, of_validation, unsupported
from inflight.http.dialects.anthropic.fields import MessageParam
from inflight.http.dialects.image_urls import NO_FETCHING, url_part
from inflight.text.safe_text import safe_text

T = TypeVar("T")


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """What all kinds may have, to no effect."""

    cache_control: dict[str, Any] | None = None
    citations: Any = None


class Text(Block, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImageSource(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    media_type: str = ""
    data: str = ""
    """The file in base64."""


class Image(Block, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="image"):
    source: ImageSource


class Thought(Block, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUse(Block, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResult(Block, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    """Without effect: what went wrong is in the text."""


KINDS: dict[str, dict[str, type[Block]]] = {
    "user": {"text": Text, "image": Image, "tool_result": ToolResult},
    "assistant": {"text": Text, "thinking": Thought, "tool_use": ToolUse},
    "system": {"text": Text},
}
"""By role, the blocks that a message may have."""


def chat_messages(given: list[MessageParam], system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Raises APIError."""
    turns: list[list[dict[str, Any]]] = []
    if system:
        turns.append([{"role": "system", "content": joined(system, "system")}])
    for index, message in enumerate(given):
        for each in _of_message(message, f"messages[{index}].content"):
            last = turns[-1][-1] if turns else None
            if last is not None and last["role"] == each["role"] != "tool" and "tool_calls" not in last:
                turns[-1].append(each)
            else:
                turns.append([each])
    return [_one(turn) for turn in turns]


def joined(content: str | list[dict[str, Any]], where: str) -> str:
    """Text, or blocks of text. Raises APIError."""
    if isinstance(content, str):
        return content
    return "\n".join(
        block.text for block in _blocks(content, KINDS["system"], where) if isinstance(block, Text) and block.text
    )


def _of_message(message: MessageParam, where: str) -> Iterator[dict[str, Any]]:
    content = message.content
    if isinstance(content, str):
        yield {"role": message.role, "content": content}
        return
    blocks = list(_blocks(content, KINDS[message.role], where))
    if message.role == "assistant":
        yield _answer(blocks)
        return
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResult):
            if parts:
                yield {"role": message.role, "content": _text_or_parts(parts)}
                parts = []
            text = joined(block.content or "", f"{where}[{index}].content")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        elif isinstance(block, Text):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, Image):
            if block.source.type != "base64":
                raise unsupported(f"{where}[{index}].source.type", NO_FETCHING)
            parts.append(url_part(block.source.data, block.source.media_type))
    if parts or not blocks:
        yield {"role": message.role, "content": _text_or_parts(parts)}


def _text_or_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts if there is an image among them."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _parts_of(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _answer(blocks: list[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, Text)),
    }
    if thoughts := [block.thinking for block in blocks if isinstance(block, Thought)]:
        message["reasoning"] = "\n".join(thoughts)
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUse)
    ]
    return {**message, "tool_calls": calls} if calls else message


def _one(turn: list[dict[str, Any]]) -> dict[str, Any]:
    """Messages of one role as one. Only the last may call tools."""
    contents = [part for each in turn if each["content"] for part in _parts_of(each["content"])]
    message = {**turn[-1], "content": _text_or_parts(contents)}
    if thoughts := [each["reasoning"] for each in turn if each.get("reasoning")]:
        message["reasoning"] = "\n".join(thoughts)
    return message


def _blocks(given: list[dict[str, Any]], kinds: dict[str, type[Block]], where: str) -> Iterator[Block]:
    for index, each in enumerate(given):
        place, kind = f"{where}[{index}]", each.get("type")
        if kind == "redacted_thinking":
            raise unsupported(place, "only the service that has encrypted thinking can read it")
        if not isinstance(kind, str) or kind not in kinds:
            raise unsupported(f"{place}.type", f"{safe_text(str(kind))} is none of {', '.join(kinds)}")
        yield read_struct(each, kinds[kind], place)


def read_struct(given: dict[str, Any], kind: type[T], where: str) -> T:
    """`where`: the field that holds it. Raises APIError."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise of_validation(error, where) from None


def calls_are_open(messages: list[dict[str, Any]]) -> APIError | None:
    """What is wrong with a conversation that ends with calls."""
    if "tool_calls" not in messages[-1]:
        return None
    return invalid("the last message calls tools: send their results as tool_result blocks of a user", "messages")
