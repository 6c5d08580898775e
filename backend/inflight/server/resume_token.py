"""A resume token: what the client of a stream has of it, so that it can go on when its whole server has ended.

Each response adds a part, and the token of a stream is the joined parts of its responses, in their order. So a stream
carries each of its tokens once more, however long it is, and the text that a client has always belongs to the tokens
that its resume token holds.

    token  = "1:" head "." part "." part "." …       1: the version
    head   = what request on what checkpoint it is, and its seed
    part   = tokens of one sequence, and how it ended if it did
             both: base64url(msgpack, CRC-32 of all bytes so far)

The checksum runs on from part to part: one that is missing, doubled or in another's place is found. It keeps out
mistakes, not clients: one that makes up a token only chooses itself what its own output begins with, as it could in its
prompt, and what the ranks take of it is checked as any request is. Knows no tensors and no text.
"""

from __future__ import annotations

import math
import zlib
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from inflight.errors import InvalidRequest
from inflight.replay import DeliveredSequence
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason

VERSION = "1"
END = "."
CHECKSUM_BYTES = 4
MAX_BYTES = 2**26
"""A request that has more does not fit into a message to the engine."""
BYTES_PER_TOKEN = 64
"""Bytes of a part that holds a single token, at most: 20 of msgpack and the checksum, in base64."""
BYTES_BESIDES = 4096
"""Of the head, and of the parts without tokens that end sequences."""

DAMAGED = "resume_token is damaged: it must be the resume_token of all responses so far, joined in their order"


class Head(Struct, frozen=True, array_like=True, kw_only=True):
    """Which stream it is."""

    checkpoint: bytes
    """Digest of what the tokens are computed with."""
    request: bytes
    """Digest of what was asked for."""
    seed: Annotated[int, Meta(ge=0)]
    """Of the request, which may have drawn it at its acceptance."""


class Part(Struct, frozen=True, array_like=True, kw_only=True):
    """What one response holds of one sequence."""

    sequence_index: Annotated[int, Meta(ge=0)]
    token_ids: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    cum_log_prob: float | None
    """Sum over all tokens of the sequence so far; None if no log probabilities were asked for."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """One that a client has sent."""

    head: Head
    parts: Sequence[Part]
    checksum: int

    @classmethod
    def parse(cls, text: str, max_parts: int) -> ResumeToken:
        """Raises InvalidRequest with one sentence, and reads none of more than `max_parts` parts."""
        version, _, joined = text.partition(":")
        if version.isdigit() and version != VERSION:
            raise InvalidRequest(f"resume_token is of version {version[:8]}, and this server has version {VERSION}")
        num_parts = joined.count(END) - 1
        if num_parts > max_parts:
            raise InvalidRequest(f"resume_token has {num_parts} parts, more than this request can have responses")
        head, *pieces = joined.split(END)
        if version != VERSION or not pieces or pieces.pop():
            raise InvalidRequest(DAMAGED)
        try:
            first, checksum = _read(_head, head, 0)
            parts = []
            for piece in pieces:
                part, checksum = _read(_part, piece, checksum)
                parts.append(part)
        except (ValueError, msgspec.DecodeError):
            raise InvalidRequest(DAMAGED) from None
        return cls(first, parts, checksum)

    def delivered(self, num_sequences: int) -> tuple[list[DeliveredSequence], list[FinishReason]]:
        """What the client has of each sequence, and how it ended. Raises InvalidRequest."""
        token_ids: list[list[int]] = [[] for _ in range(num_sequences)]
        sums, reasons = [0.0] * num_sequences, [FinishReason.NOT_FINISHED] * num_sequences
        for part in self.parts:
            index = part.sequence_index
            if index >= num_sequences or not math.isfinite(part.cum_log_prob or 0.0):
                raise InvalidRequest(DAMAGED)
            token_ids[index] += part.token_ids
            sums[index] = part.cum_log_prob or 0.0
            reasons[index] = part.finish_reason
        if all(reasons):
            raise InvalidRequest("resume_token holds the end of every sequence: nothing is left to generate")
        delivered = [
            DeliveredSequence(token_ids=ids, cum_log_prob=total, is_finished=reason is not FinishReason.NOT_FINISHED)
            for ids, total, reason in zip(token_ids, sums, reasons, strict=True)
        ]
        return delivered, reasons


class ResumeTokenWriter:
    """Writes the parts of one stream, in the order in which its responses are sent."""

    def __init__(self, head: Head, begun: ResumeToken | None = None) -> None:
        """`begun`: what the client has already."""
        self._unsent_head = head if begun is None else None
        self._checksum = 0 if begun is None else begun.checksum

    def write(self, part: Part) -> str:
        """What the token grows by."""
        head, self._unsent_head = self._unsent_head, None
        opening = "" if head is None else f"{VERSION}:{self._write(head)}"
        return opening + self._write(part)

    def _write(self, value: Head | Part) -> str:
        packed = _encoder.encode(value)
        self._checksum = zlib.crc32(packed, self._checksum)
        return urlsafe_b64encode(packed + self._checksum.to_bytes(CHECKSUM_BYTES, "little")).decode() + END


def max_bytes(limits: RequestLimits) -> int:
    """Most bytes of a token that a request may bring."""
    return min(BYTES_PER_TOKEN * limits.max_seq_len * limits.max_batch_size + BYTES_BESIDES, MAX_BYTES)


_encoder = msgspec.msgpack.Encoder()
_head = msgspec.msgpack.Decoder(Head)
_part = msgspec.msgpack.Decoder(Part)
_Value = TypeVar("_Value", Head, Part)


def _read(decoder: msgspec.msgpack.Decoder[_Value], piece: str, checksum: int) -> tuple[_Value, int]:
    """The value, and the checksum with it. Raises ValueError or msgspec.DecodeError."""
    raw = b64decode(piece, altchars=b"-_", validate=True)
    packed, found = raw[:-CHECKSUM_BYTES], int.from_bytes(raw[-CHECKSUM_BYTES:], "little")
    checksum = zlib.crc32(packed, checksum)
    if found != checksum:
        raise ValueError
    return decoder.decode(packed), checksum
