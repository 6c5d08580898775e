"""All messages between fronts and leader, and between leader and ranks: msgpack, one tagged struct per message.

    front -> leader    Hello, Submit, Cancel, CancelSequence, Goodbye, Shutdown
    leader -> front    Welcome, Occupied, Started, Responses, Stats, Iterations, KvCacheEvents, Heartbeat, Fatal
    leader -> ranks    RankInput

A message is one frame. Responses that hold tensors have their numbers behind it, a frame for each tensor: numbers that
nobody looks at on their way are not packed into a message and out of it again.

Decoding checks every type, and no message can cause code to be loaded or run. Knows no socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec
from msgspec import structs

from inflight.engine_description import EngineDescription
from inflight.errors import InvalidRequest
from inflight.executor.wire.block_messages import NO_BLOCK_ORDERS, BlockOrders
from inflight.kv_cache_events import KVCacheEvent
from inflight.lora import NO_ORDERS, AdapterOrders
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, NamedTensor, Response
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
    wants_kv_cache_events: bool = False
    """Whether it keeps what happens to the cached blocks, if the engine notes that."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[int]


class CancelSequence(msgspec.Struct, frozen=True, tag=True):
    """End one of several sequences of a request early: a stop string was found in its text."""

    request_id: int
    sequence_index: int


class Received(msgspec.Struct, frozen=True, tag=True):
    """This front has got all responses so far."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """This front disconnects: its requests are cancelled. The ranks keep running."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the ranks now: requests in flight end with the tokens computed so far."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to Hello: the engine is ready."""

    limits: RequestLimits
    description: EngineDescription
    max_in_flight: int
    """Requests that the engine accepts from all fronts together; 0 = no limit."""
    pid: int
    """Process id of the leader."""


class Occupied(msgspec.Struct, frozen=True, tag=True):
    """Answer to Hello: another front of this engine uses that front id."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The ranks begin these requests: from now on they may die of them."""

    request_ids: list[int]


class Responses(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """All responses of one iteration to the requests of one front."""

    responses: list[Response]
    to_be_confirmed: bool = False
    """Whether the leader waits for Received, because what comes next may kill the ranks, and with them messages that
    are on their way."""


class Stats(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    json: str
    num_queued: int = 0
    """Requests of all fronts waiting on the leader. The batch manager, which makes the JSON, does not know of them."""


class Iterations(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Statistics of the iterations since the last such message, oldest first, for fronts that asked for them."""

    iteration_stats: list[IterationStats] = []
    request_stats: list[RequestStatsPerIteration] = []


class KvCacheEvents(msgspec.Struct, frozen=True, tag=True):
    """What happened to the cached blocks since the last such message, for fronts that asked for it. The first message
    of a launch also has what happened before there was such a front, as far as it was kept."""

    events: list[KVCacheEvent]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Every rank has just answered a tick."""


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The ranks end because of an error; `reason` says which."""

    reason: str


FromFront = Hello | Submit | Cancel | CancelSequence | Received | Goodbye | Shutdown
FromLeader = Welcome | Occupied | Started | Responses | Stats | Iterations | KvCacheEvents | Heartbeat | Fatal


class RankInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The input of every rank in one iteration."""

    requests: list[Request] = []
    stops: dict[int, FinishReason] = {}
    cancelled_sequences: list[tuple[int, int]] = []
    """(request id, sequence index) of sequences that end now, while others of their requests go on."""
    tick: bool = False
    """If true, all ranks enter a barrier, after which the leader knows that all are alive."""
    adapters: AdapterOrders = NO_ORDERS
    blocks: BlockOrders = NO_BLOCK_ORDERS
    shutdown: bool = False
    """If true, ranks take no more requests and end when none is active."""
    token_budget: int = 0
    """If positive, tokens that a step may have from now on in which sequences decode."""
    now_ms: int = 0
    """The leader's steady clock; 0 = it is not told. Durations of KV cache retention count on it."""


NO_INPUT = RankInput()

_encoder = msgspec.msgpack.Encoder()
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_from_leader: msgspec.msgpack.Decoder[FromLeader] = msgspec.msgpack.Decoder(FromLeader)
_rank_input = msgspec.msgpack.Decoder(RankInput)
_request = msgspec.msgpack.Decoder(Request)


def encode(message: FromFront | FromLeader) -> bytes:
    return _encoder.encode(message)


def encode_request(request: Request) -> bytes:
    """Equal requests have equal bytes."""
    return _encoder.encode(request)


def as_received(request: Request) -> Request:
    """A copy of the request as every rank will decode it. Raises InvalidRequest if a field has a wrong type: programs
    can make such a Request, and the leader would drop its message, so that nobody ever answered it."""
    try:
        return _request.decode(_encoder.encode(request))
    except (TypeError, OverflowError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"a field of the request has a wrong type: {error}") from None


def encode_frames(message: FromLeader) -> list[bytes]:
    """The message, and behind it the numbers of its tensors."""
    tensors = _tensors(message)
    if not tensors:
        return [_encoder.encode(message)]
    bare = _with_tensors(message, iter([structs.replace(tensor, data=b"") for tensor in tensors]))
    return [_encoder.encode(bare), *(tensor.data for tensor in tensors)]


def decode_frames(frames: list[bytes]) -> FromLeader:
    """The inverse. Raises BadMessage, also where frames and tensors do not fit together."""
    message, numbers = decode_from_leader(frames[0]), frames[1:]
    tensors = _tensors(message)
    if len(tensors) != len(numbers):
        raise BadMessage(f"{len(numbers)} frames of numbers for {len(tensors)} tensors")
    if not tensors:
        return message
    filled = [structs.replace(tensor, data=data) for tensor, data in zip(tensors, numbers, strict=True)]
    for tensor in filled:
        try:
            tensor.array()
        except (TypeError, ValueError):
            raise BadMessage(f"{len(tensor.data)} bytes that are not a tensor") from None
    return _with_tensors(message, iter(filled))


def _tensors(message: FromLeader) -> list[NamedTensor]:
    if not isinstance(message, Responses):
        return []
    results = (response.result for response in message.responses)
    return [tensor for result in results if result is not None for tensor in result.tensors]


def _with_tensors(message: FromLeader, tensors: Iterator[NamedTensor]) -> FromLeader:
    """The same Responses with other tensors, as many and in the same order."""
    assert isinstance(message, Responses)
    responses: list[Response] = []
    for response in message.responses:
        if response.result is not None and response.result.tensors:
            result = structs.replace(response.result, tensors=[next(tensors) for _ in response.result.tensors])
            response = structs.replace(response, result=result)
        responses.append(response)
    return Responses(responses)


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
