"""What a program and its vision process exchange: msgpack, one message a frame.

program -> process    See
process -> program    Ready or Unusable once, then a Picture or an Unreadable for each See
"""

from __future__ import annotations

import msgspec

from inflight.prompt_tuning import EmbeddingType
from inflight.vision.seen import Picture, Unreadable

LOAD_SECONDS = 300.0
"""For the process to get ready; then it ends."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of a process, from its start to its end."""

    folder: str
    """The checkpoint's."""
    max_pixels: int
    """Width times height of a picture."""
    max_seconds: float
    """For each picture; then the process ends."""


class See(msgspec.Struct, frozen=True, kw_only=True):
    data: bytes
    """The picture's file."""
    dtype: EmbeddingType
    """Of the rows."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    image_token: str
    """The placeholder, as text."""


class Unusable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The checkpoint's pictures can never be read here; the process ends."""

    why: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    picture: Picture | None = None
    unreadable: Unreadable | None = None
    """One of the two."""


FromProcess = Ready | Unusable | Answer

encoder = msgspec.msgpack.Encoder()
settings_decoder: msgspec.json.Decoder[Settings] = msgspec.json.Decoder(Settings)
see_decoder: msgspec.msgpack.Decoder[See] = msgspec.msgpack.Decoder(See)
answer_decoder: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
