"""A conversation as clients write it, made what `Chat` has: plain dictionaries with text as content, or parts."""

from __future__ import annotations

import json
from typing import Any

from inflight.asking.template_habits import THOUGHTS
from inflight.http.api_error import APIError, invalid
from inflight.http.dialects.image_urls import read_url

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS: dict[str, type | tuple[type, ...]] = {
    "role": str,
    "content": (str, list),
    "name": str,
    "tool_calls": list,
    "tool_call_id": str,
    "reasoning": str,
    "reasoning_content": str,
    "refusal": str,
    "annotations": list,
}
"""What a message may have; null counts as not given, and so does an empty list but as content."""


def read_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises APIError."""
    if not given:
        raise invalid("messages is empty: give at least one", "messages")
    return [_read(each, f"messages[{index}]") for index, each in enumerate(given)]


def _read(given: dict[str, Any], where: str) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None and (value != [] or name == "content")}
    for name, value in message.items():
        if name not in FIELDS:
            raise invalid(f"{where} has a field that messages do not have here", where, "unknown_parameter")
        if not isinstance(value, FIELDS[name]):
            raise invalid(f"{where}.{name} has the wrong type", f"{where}.{name}", "invalid_type")
    if message.get("role") not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    if "content" not in message and message["role"] != "assistant":  # an answer may have been calls or reasoning alone
        raise invalid(f"{where}.content is missing", f"{where}.content")
    message["content"] = _content(message.get("content", message.pop("refusal", "")), where, message["role"])
    message.pop("annotations", None)  # of an earlier answer: they say nothing to a model
    # Clients use the first two names for what a model has thought before an answer; templates know one of the three.
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought:
        message |= dict.fromkeys(THOUGHTS, thought)
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call, where) for call in message["tool_calls"]]
    return message


def _content(content: str | list[Any], where: str, role: str) -> str | list[dict[str, Any]]:
    """Text; parts if there is an image among them."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    if role != "user":
        raise invalid(f"{where}.content may hold an image in a message of the user only", where)
    return parts


def _part(given: Any, where: str) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = given.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return {"type": "text", "text": text}
    elif kind in ("image_url", "input_image"):
        found = given.get("image_url")
        url = found.get("url") if isinstance(found, dict) else found
        if isinstance(url, str):
            return read_url(url, f"{where}.image_url")
    raise invalid(f"{where} must be text, or an image_url with a URL", where)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Templates write the arguments themselves: they take them as an object, not as JSON in a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad_call(where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _bad_call(where) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _bad_call(where: str) -> APIError:
    return invalid(f"{where}.tool_calls must hold functions with a name, and arguments that are JSON", where)
