"""A prompt that one engine computes and another one continues: what is asked of each, and what the first one says.

    context only      the prompt and its first tokens are computed; the answer has ContextPhaseParams
    generation only   a request with these: the keys and values of its prompt are fetched from the ranks that computed
                      them, and its answer is that of an engine which had done all of it

The names are TensorRT-LLM's. Knows no ranks, and not how keys and values travel.
"""

from __future__ import annotations

import enum

import msgspec

from inflight.errors import InvalidRequest

VERSION = 1
MAX_PARAMS_BYTES = 2**16
"""Of ContextPhaseParams as bytes: those of thousands of ranks or sequences are shorter."""


class RequestType(enum.IntEnum):
    CONTEXT_AND_GENERATION = 0
    CONTEXT_ONLY = 1
    GENERATION_ONLY = 2

    @property
    def wire(self) -> str:
        """As clients write it: context_only."""
        return self.name.lower()


class ContextPhaseParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a context-only request is answered with, and a generation-only one brings."""

    version: int = VERSION
    req_id: int
    """Of the context-only request, at its engine."""
    first_gen_tokens: list[int]
    """The first token of each sequence, in their order."""
    opaque_state: bytes = b""
    """Where the keys and values of the prompt are, for the ranks alone (inflight.executor.wire.context_state)."""

    def serialize(self) -> bytes:
        """For clients, who pass it on as it is."""
        return _encoder.encode(self)

    @classmethod
    def deserialize(cls, data: bytes) -> ContextPhaseParams:
        """The inverse. Raises InvalidRequest."""
        if len(data) > MAX_PARAMS_BYTES:
            raise InvalidRequest(f"context_phase_params has {len(data)} bytes, more than {MAX_PARAMS_BYTES}")
        try:
            params = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise InvalidRequest(NOT_PARAMS) from None
        if params.version != VERSION:
            raise InvalidRequest(
                f"context_phase_params is of version {params.version}, and this engine has version {VERSION}"
            )
        return params


NOT_PARAMS = "context_phase_params must be the bytes that a context_only request was answered with"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ContextPhaseParams)


class ContextTransfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the leader tells the ranks of the keys and values of a request's prompt."""

    export_key: bytes = b""
    """Under which each rank keeps its part of those that it computes, to be fetched; empty = it keeps none."""
    num_arrived_tokens: int = 0
    """How many leading tokens of the prompt have theirs on all ranks already, in host memory."""
