"""What a front and the process that its ranks are forked from say to each other, over a socket that keeps messages.

The server says Ready once, when it has imported all; then it answers each message with one.
"""

from __future__ import annotations

import msgspec

ROOM = "INFLIGHT_ROOM"
"""Variable of the server that nobody reads. Its length is room for the variables of a launch (rank/own_image.py)."""
ROOM_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 2 * ROOM_BYTES


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Ranks can be forked."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a rank."""

    variables: dict[str, str]
    """Of its environment, beside the server's own."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    pid: int
    """It stays that rank's until Reap, also if the rank ends."""


class CannotFork(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Wait for a rank's end, and forget it."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    code: int
    """Exit code; -N if signal N killed it."""


ToServer = Fork | Reap
FromServer = Ready | Forked | CannotFork | Ended

_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encode(message: ToServer | FromServer) -> bytes:
    return _encoder.encode(message)


def decode_to_server(data: bytes) -> ToServer:
    return _to_server.decode(data)


def decode_from_server(data: bytes) -> FromServer:
    return _from_server.decode(data)
