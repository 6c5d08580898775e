"""What the leader rank and the processes of grammars tell each other, in msgpack.

leader -> first process      Compile, with the socket of the new process
leader -> grammar            lists of Advance and Close: those of all rows of a step in one packet
grammar -> leader            Started, then Compiled or Refused, then lists of Masks, one for each Advance that asks
"""

from __future__ import annotations

import msgspec

from inflight.guided_decoding import GuidedDecodingParams

MAX_PACKET = 128 * 1024
"""Bytes; the system's socket buffers hold one packet of this size in any case."""
MAX_TOKENS_PER_PACKET = 8192
"""Of all that a packet says to matchers, each message counted as one token more."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    params: GuidedDecodingParams


class Advance(msgspec.Struct, frozen=True, tag=True):
    """The next output tokens of a matcher, which is made if it does not exist."""

    matcher: int
    token_ids: list[int]
    end_ids: list[int] | None = None
    """Tokens that end the output; given with a matcher's first tokens."""
    wants_mask: bool = True


class Close(msgspec.Struct, frozen=True, tag=True):
    matcher: int


class Started(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    num_bytes: int
    """Memory that the process has for itself."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The grammar cannot be used; the sentence is for the client."""

    reason: str


class Mask(msgspec.Struct, frozen=True, tag=True):
    matcher: int
    bits: bytes
    """One bit a token, lowest first, in words of 32 bits; empty if there is none, see `error`."""
    error: str = ""


ToGrammar = Advance | Close
FromGrammar = Started | Compiled | Refused | list[Mask]

_encoder = msgspec.msgpack.Encoder()
_compile = msgspec.msgpack.Decoder(Compile)
_to_grammar = msgspec.msgpack.Decoder(list[ToGrammar])
_from_grammar: msgspec.msgpack.Decoder[FromGrammar] = msgspec.msgpack.Decoder(FromGrammar)

encode = _encoder.encode
decode_compile = _compile.decode
decode_to_grammar = _to_grammar.decode
decode_from_grammar = _from_grammar.decode
