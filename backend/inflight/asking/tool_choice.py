"""Which of the tools that are offered the model may call, or must."""

from __future__ import annotations

import msgspec

MODES = ("none", "auto", "required")


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    mode: str = ""
    """One of MODES; "" = not said, which is auto where there are tools."""
    name: str | None = None
    """Exactly one call, of this tool."""
    allowed: list[str] | None = None
    """The model is told of all tools, and calls none but these; None = any."""
    is_parallel: bool = True
    """Whether there may be several calls in one answer."""
