"""What the leader rank and the processes of grammars tell each other, in msgpack.

leader -> first process      Compile, with the socket of the new process
leader -> grammar            lists of Advance and Close: those of all rows of a step in one packet
grammar -> leader            Started, then Compiled or Refused, then lists of Masks, those that an Advance asks for in
                             a row: of the token behind its tokens, then of those behind each of its drafts
"""

from __future__ import annotations

import msgspec

from inflight.guided_decoding import GuidedDecodingParams

MAX_PACKET = 128 * 1024
"""Bytes; the system's socket buffers hold one packet of this size in any case."""
MAX_TOKENS_PER_PACKET = 8192
"""Of all that a packet says to matchers, each message counted as one token more."""
MAX_FORCED = 32
"""Forced tokens that are found at once."""


class Compile(msgspec.Struct, frozen=True, tag=True):
    params: GuidedDecodingParams


class Advance(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The next output tokens of a matcher, which is made if it does not exist."""

    matcher: int
    token_ids: list[int]
    end_ids: list[int] | None = None
    """Tokens that end the output; given with a matcher's first tokens."""
    wants_mask: bool = True
    """Of the token behind `token_ids`."""
    drafts: list[int] = []
    """Guessed next tokens. The matcher does not take them in; a mask is wanted behind each of them."""

    @property
    def num_masks(self) -> int:
        """How many it asks for."""
        return int(self.wants_mask) + len(self.drafts)


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


class Mask(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    matcher: int
    bits: bytes
    """One bit a token, lowest first, in words of 32 bits. Empty if there is none, see `error`; without an error it is
    behind a draft that the grammar forbids, where it does not matter."""
    error: str = ""
    forced: list[int] = []
    """Most likely next tokens where the grammar leaves the next text no choice; empty also if they continue the last
    ones that were sent."""


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
