"""What ends an answer before its limit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    texts: Sequence[str] = ()
    """Found wherever the borders of tokens lie."""
    token_ids: Sequence[int] = ()
    sequences: Sequence[list[int]] = ()
    """Rows of tokens."""
    ends_by_itself: bool = True
    """Whether the checkpoint's own end tokens end it, too."""
    is_kept: bool = False
    """Whether the text holds what has ended it."""
