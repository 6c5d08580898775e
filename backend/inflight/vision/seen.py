"""What becomes of a picture: immutable values, which every request that shows it shares."""

from __future__ import annotations

import msgspec

from inflight.prompt_tuning import EmbeddingTable


class Picture(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    text: str
    """What stands for it in a prompt's text: the placeholder once for each row, and what the checkpoint has between."""
    rows: EmbeddingTable
    """In the order of the placeholders."""


class Unreadable(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    why: str
    """A clause about the picture, such as "is truncated or damaged"."""
    is_lasting: bool = True
    """Whether the file alone is the reason, and it would be the same another time."""


Seen = Picture | Unreadable
