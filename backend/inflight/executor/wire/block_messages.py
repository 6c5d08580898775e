"""The messages by which a prompt's blocks go from one engine's ranks to another's: msgpack, one tagged struct each.

    receiver -> sender    Fetch, Taken
    sender -> receiver    Shared, Payload (behind which the bytes are a frame of their own), Gone
    rank -> its leader    Serves, Fetched
    leader -> its ranks   BlockOrders, as a part of their input

Rank r of the one engine fetches from rank r of the other: both split the network in the same way. Knows no socket.
"""

from __future__ import annotations

import msgspec


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank's blocks are fetched."""

    local: str
    """For processes of the same machine: ipc://PATH in a folder that only its user can enter."""
    remote: str = ""
    """For others: tcp://ADDRESS:PORT; empty = they cannot."""


class Fetch(msgspec.Struct, frozen=True, tag=True):
    key: bytes
    is_local: bool
    """Whether the receiver can map the sender's memory."""


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The receiver has it all: the sender may forget it."""

    key: bytes


class Shared(msgspec.Struct, frozen=True, tag=True):
    """Memory of the sender's process."""

    path: str
    device: int
    inode: int
    """Of the file that `path` must lead to: elsewhere it may lead to another one."""
    num_bytes: int


class Payload(msgspec.Struct, frozen=True, tag=True):
    """The bytes follow."""


class Gone(msgspec.Struct, frozen=True, tag=True):
    """There is nothing under this key, or not any more."""


class Serves(msgspec.Struct, frozen=True, tag=True):
    """A rank can be asked for its blocks."""

    rank: int
    endpoint: Endpoint


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """A rank has its part of a request's prompt, or will not get it."""

    rank: int
    request_id: int
    number: int
    """Of the fetch: one that was given up may have been for the same request."""
    has_arrived: bool


class BlockFetch(msgspec.Struct, frozen=True):
    """What every rank is to fetch for a request."""

    request_id: int
    number: int
    key: bytes
    endpoints: list[Endpoint]
    """Of each rank of the other engine."""
    is_local: bool
    num_blocks: int
    """A rank knows how many bytes its part of a block has: one with more layers has more."""


class BlockOrders(msgspec.Struct, frozen=True, omit_defaults=True):
    fetches: list[BlockFetch] = []
    drops: list[int] = []
    """Ids of requests that do not need what was fetched for them."""


NO_BLOCK_ORDERS = BlockOrders()

ToSender = Fetch | Taken
FromSender = Shared | Payload | Gone
Report = Serves | Fetched

_encoder = msgspec.msgpack.Encoder()
to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)
from_sender: msgspec.msgpack.Decoder[FromSender] = msgspec.msgpack.Decoder(FromSender)
report: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode_block_message(message: ToSender | FromSender | Report) -> bytes:
    return _encoder.encode(message)
