"""The items of a conversation: messages, reasoning, calls of functions and their outputs, as clients send them and as
responses hold them. Those that were read have their content and their outputs as text, or content as parts where it
holds an image.

Ids, states, phases, annotations and log probabilities come back with the items of responses. They say nothing to a
model.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import structs

from inflight.http.api_error import invalid, of_validation, unsupported
from inflight.text.safe_text import safe_text

T = TypeVar("T")
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a message's content, of a function's output, or of reasoning."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    """Without effect: the checkpoint's processor chooses the size."""


class RefusalPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["refusal"]
    refusal: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """JSON."""
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None
    async_: None = msgspec.field(default=None, name="async")


class FunctionCallOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    namespace: None = None
    caller: None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    content: list[TextPart] | None = None
    summary: list[TextPart] | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: str | None = None


Item = Message | FunctionCall | FunctionCallOutput | Reasoning

KINDS: dict[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
}


def read_items(given: list[dict[str, Any]], where: str = "input") -> list[Item]:
    """`where`: the field that holds them. Raises APIError."""
    return [_read(each, f"{where}[{index}]") for index, each in enumerate(given)]


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_struct(given: dict[str, Any], kind: type[T], where: str) -> T:
    """`where`: the field that holds it. Raises APIError."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise of_validation(error, where) from None


def _read(given: dict[str, Any], where: str) -> Item:
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in KINDS:
        named = safe_text(str(kind))
        raise unsupported(f"{where}.type", f"{named} is none of {', '.join(KINDS)}")
    item = read_struct(given, KINDS[kind], where)
    if isinstance(item, Message):
        return structs.replace(item, content=_content(item.content, f"{where}.content", has_images=item.role == "user"))
    if isinstance(item, FunctionCallOutput):
        return structs.replace(item, output=_text(item.output, f"{where}.output"))
    if isinstance(item, Reasoning) and item.encrypted_content is not None:
        raise unsupported(f"{where}.encrypted_content", "only the service that has encrypted it can read it")
    if isinstance(item, FunctionCall) and not is_json_object(item.arguments):
        raise invalid(f"{where}.arguments must be a JSON object", f"{where}.arguments")
    return item


def _content(content: str | list[dict[str, Any]], where: str, *, has_images: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str) or not has_images or all(part.get("type") != "input_image" for part in content):
        return _text(content, where)
    return [
        msgspec.to_builtins(
            read_struct(part, ImagePart, f"{where}[{index}]")
            if part.get("type") == "input_image"
            else _part(part, f"{where}[{index}]")
        )
        for index, part in enumerate(content)
    ]


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    parts = [_part(each, f"{where}[{index}]") for index, each in enumerate(content)]
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)


def _part(given: dict[str, Any], where: str) -> TextPart | RefusalPart:
    kind = given.get("type")
    if kind == "refusal":
        return read_struct(given, RefusalPart, where)
    if kind not in ("input_text", "output_text"):
        raise unsupported(f"{where}.type", f"{safe_text(str(kind))} is no text")
    return read_struct(given, TextPart, where)
