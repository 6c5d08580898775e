"""All messages between fronts and leader, and between leader and ranks: msgpack, one tagged struct per message.

    front -> leader    Hello, Submit, Cancel, Goodbye, Shutdown
    leader -> front    Welcome, Occupied, Responses, Stats, Iterations, Heartbeat, Fatal
    leader -> ranks    RankInput

Decoding checks every type, and no message can cause code to be loaded or run. Knows no socket.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from inflight.request import Request, RequestLimits
from inflight.result import FinishReason, Response
from inflight.stats import IterationStats, RequestStatsPerIteration

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The leader closes the connection of a sender of a longer message. A million prompt tokens take 5 MB."""

FRONT_ID_SHIFT = 48
"""The request ids of a front have its front id in the upper 16 bits and a counter below."""

MAX_FRONT_ID = 2**16 - 1


class BadMessage(Exception):
    """The bytes are not a valid message. The error text quotes none of them, as they may hold a prompt."""


class Hello(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A front's first message."""

    front_id: int
    """1 to MAX_FRONT_ID: the upper 16 bits of the front's request ids. The front chooses it and keeps it over
    relaunches. If the leader numbered fronts in order of arrival, two fronts could swap numbers after a relaunch."""
    pid: int
    wants_iteration_stats: bool = False
    """Whether it keeps the statistics of every iteration; otherwise none are made for it."""
    wants_request_stats: bool = False
    """The same of every request in every iteration."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[int]


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """This front disconnects: its requests are cancelled. The ranks keep running."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the ranks now: requests in flight end with the tokens computed so far."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to Hello: the engine is ready."""

    limits: RequestLimits
    device: str
    """Device type of the ranks, cpu or cuda."""
    max_in_flight: int
    """Requests that the engine accepts from all fronts together; 0 = no limit."""
    pid: int
    """Process id of the leader."""


class Occupied(msgspec.Struct, frozen=True, tag=True):
    """Answer to Hello: another front of this engine uses that front id."""


class Responses(msgspec.Struct, frozen=True, tag=True):
    """All responses of one iteration to the requests of one front."""

    responses: list[Response]


class Stats(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    json: str
    num_queued: int = 0
    """Requests of all fronts waiting on the leader. The batch manager, which makes the JSON, does not know of them."""


class Iterations(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Statistics of the iterations since the last such message, oldest first, for fronts that asked for them."""

    iteration_stats: list[IterationStats] = []
    request_stats: list[RequestStatsPerIteration] = []


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Every rank has just answered a tick."""


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The ranks end because of an error; `reason` says which."""

    reason: str


FromFront = Hello | Submit | Cancel | Goodbye | Shutdown
FromLeader = Welcome | Occupied | Responses | Stats | Iterations | Heartbeat | Fatal


class RankInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The input of every rank in one iteration."""

    requests: list[Request] = []
    stops: dict[int, FinishReason] = {}
    tick: bool = False
    """If true, all ranks enter a barrier, after which the leader knows that all are alive."""
    shutdown: bool = False
    """If true, ranks take no more requests and end when none is active."""


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
    """b"" for an iteration without input, which is by far the most frequent case."""
    return b"" if rank_input == NO_INPUT else _encoder.encode(rank_input)


def decode_rank_input(payload: bytes) -> RankInput:
    return _decode(_rank_input, payload) if payload else NO_INPUT


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise BadMessage(f"{len(frame)} bytes that are not a valid message ({type(error).__name__})") from None
