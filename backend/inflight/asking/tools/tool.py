"""A function that a request offers to the model."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from inflight.errors import InvalidRequest

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The names are OpenAI's. What is None is not said, and chat templates are not told of it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None for a function without arguments."""
    strict: bool | None = None
    """Whether the arguments of a call follow the schema also where the model may choose."""

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments, with its type stated."""
        return {"type": "object", "properties": {}, **(self.parameters or {})}

    def validate(self) -> None:
        """Raise InvalidRequest, with one sentence, if no call of it could be written or read."""
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"the name of a tool has 1 to {MAX_NAME_CHARS} letters, digits, underscores and dashes, "
                f"which {self.name[: MAX_NAME_CHARS + 1]!r} has not"
            )
        if self.schema["type"] != "object":
            raise InvalidRequest(f"the parameters of tool {self.name} must be a JSON schema of type object")
        properties = self.schema["properties"]
        if not isinstance(properties, dict) or not all(isinstance(each, (dict, bool)) for each in properties.values()):
            raise InvalidRequest(f"the properties of tool {self.name} must each be a JSON schema")
        required = self.schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise InvalidRequest(f"the required parameters of tool {self.name} must be a list of names")


def definitions(tools: list[Tool]) -> list[dict[str, Any]]:
    """As chat templates take them."""
    return [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in tools]


def validate_tools(tools: list[Tool]) -> None:
    """Raise InvalidRequest, with one sentence, if some tool is invalid or two have the same name."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"the request has {len(tools)} tools, more than {MAX_TOOLS}")
    names: set[str] = set()
    for tool in tools:
        tool.validate()
        if tool.name in names:
            raise InvalidRequest(f"the request has two tools with the name {tool.name}")
        names.add(tool.name)
