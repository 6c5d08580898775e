"""How long an answer may be, and may take."""

from __future__ import annotations

import msgspec


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: int | None = None
    """New tokens of each choice; None = `default`."""
    may_exceed: bool = False
    """Whether it may be more than fits into the context, which then ends the answer."""
    default: int | None = None
    """As far as they fit into the context; None = as many as fit."""
    truncate_prompt_tokens: int | None = None
    """Of the prompt's tokens only the last so many are kept; -1 = those that fit, None = all."""
    allotted_time_ms: int | None = None
