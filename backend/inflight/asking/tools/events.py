"""What a text turns out to be while it arrives: reasoning, content for people, and calls of tools."""

from __future__ import annotations

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model thought before its answer."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """Text that belongs to no call."""

    text: str


class ToolCallStarted(msgspec.Struct, frozen=True):
    """A call begins. Its name is whole; its arguments follow as ToolCallArguments of the same index."""

    index: int
    """0 for the first call of a choice, then counting up."""
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """The next piece of a call's arguments, as JSON text. The pieces of a call that the model finished are together one
    JSON object."""

    index: int
    text: str


Event = Content | ToolCallStarted | ToolCallArguments
