"""A conversation that the model is to continue."""

from __future__ import annotations

from typing import Any

import msgspec

from inflight.asking.tool_choice import ToolChoice
from inflight.asking.tools.tool import Tool


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    """As chat templates take them: role, content as text, tool_calls whose arguments are objects, and what the model
    has thought under each of `template_habits.THOUGHTS`. At least one. The content of a message with pictures is a list
    of parts: texts, and what `images.image_part` makes."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = ToolChoice()
    template_kwargs: dict[str, Any] | None = None
    """Variables of the template."""
    reasoning_effort: str | None = None
    thinks: bool | None = None
    """Whether the model thinks before it answers, if the template has a variable that says so; None = as the template
    has it."""
    adds_generation_prompt: bool | None = None
    """None: unless the last message is continued."""
    continues_final_message: bool = False
    adds_special_tokens: bool = False
    """Besides those that the template writes itself."""
