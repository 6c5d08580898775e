"""Everything that front and leader, and leader and ranks, say to each other: msgpack, one tagged struct a message.

    front -> leader    Hello, Submit, Cancel, Goodbye, Shutdown
    leader -> front    Welcome, Occupied, Responses, Stats, Heartbeat, Fatal
    leader -> ranks    RankInput

Decoding checks every type, and nothing in a message can name code. Knows no socket.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from inflight.request import Request, RequestLimits
from inflight.result import FinishReason, Response

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A longer message to the leader costs its sender the connection; a million prompt tokens take 5 MB."""

FRONT_ID_SHIFT = 48
"""Request ids of one front: its id in the upper 16 bits, a counter below."""

MAX_FRONT_ID = 2**16 - 1

QUEUE_FULL = "Exceeds maximum queue size"
"""TensorRT-LLM's words, which clients look for."""


class BadMessage(Exception):
    """The bytes are no message. Its text holds nothing of the bytes."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front's first words."""

    front_id: int
    """1 to MAX_FRONT_ID, chosen by the front for all its life: the upper 16 bits of its request ids. Ids by order of
    arrival would be swapped between two fronts that find a new launch of the ranks."""
    pid: int


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[int]


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """This front leaves: its requests are cancelled. The ranks live on."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the ranks now: whoever is still waiting gets no more than what has been computed."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to Hello: the engine serves."""

    limits: RequestLimits
    device: str
    """What the ranks compute on, cpu or cuda."""
    max_in_flight: int
    """Requests that the engine accepts from all fronts together; 0 = no limit."""
    pid: int
    """Of the leader."""


class Occupied(msgspec.Struct, frozen=True, tag=True):
    """Answer to Hello: another front of this engine has that id."""


class Responses(msgspec.Struct, frozen=True, tag=True):
    """Everything that one iteration has for one front."""

    responses: list[Response]


class Stats(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    json: str
    num_queued: int = 0
    """Requests of all fronts that wait on the leader; the batch manager, which made the JSON, knows nothing of them."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Every rank has just answered."""


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The ranks end, because of this."""

    reason: str


FromFront = Hello | Submit | Cancel | Goodbye | Shutdown
FromLeader = Welcome | Occupied | Responses | Stats | Heartbeat | Fatal


class RankInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What enters every rank in one iteration."""

    requests: list[Request] = []
    stops: dict[int, FinishReason] = {}
    tick: bool = False
    """All ranks meet in a barrier, after which the leader may say that all are alive."""
    shutdown: bool = False
    """Fetch nothing more; end when nothing is active."""


NO_INPUT = RankInput()

_encoder = msgspec.msgpack.Encoder()
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_from_leader: msgspec.msgpack.Decoder[FromLeader] = msgspec.msgpack.Decoder(FromLeader)
_rank_input = msgspec.msgpack.Decoder(RankInput)


def encode(message: FromFront | FromLeader) -> bytes:
    return _encoder.encode(message)


def decode_from_front(frame: bytes) -> FromFront:
    """Raises BadMessage."""
    return _decode(_from_front, frame)


def decode_from_leader(frame: bytes) -> FromLeader:
    """Raises BadMessage."""
    return _decode(_from_leader, frame)


def encode_rank_input(rank_input: RankInput) -> bytes:
    """Empty for an iteration that brings nothing, which is nearly every one."""
    return b"" if rank_input == NO_INPUT else _encoder.encode(rank_input)


def decode_rank_input(payload: bytes) -> RankInput:
    return _decode(_rank_input, payload) if payload else NO_INPUT


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise BadMessage(f"{len(frame)} bytes that are no message ({type(error).__name__})") from None
