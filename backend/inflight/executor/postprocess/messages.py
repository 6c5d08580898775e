"""What a program and its postprocessing workers exchange: msgpack, one message a frame.

program -> worker    Open, Close, Tokens
worker -> program    Ready once, then Pieces, one for each Tokens
"""

from __future__ import annotations

import msgspec


class Open(msgspec.Struct, frozen=True, tag=True):
    """A request whose tokens will come. Its state is dropped by Close."""

    request_id: int
    num_sequences: int
    prompt_token_ids: list[int]
    stop: list[str]
    """Texts that end a sequence."""
    min_tokens: int
    """Stop strings count behind so many tokens."""
    has_beams: bool = False
    """Each NewTokens holds all tokens of its sequence, which may be another one than before."""


class Close(msgspec.Struct, frozen=True, tag=True):
    request_id: int


class NewTokens(msgspec.Struct, frozen=True):
    """New tokens of one sequence."""

    request_id: int
    sequence_index: int
    token_ids: list[int]
    is_last: bool
    """Nothing follows: what the detokenizer holds back belongs to the text."""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    new: list[NewTokens]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The tokenizer is loaded."""


NOT_STOPPED = -1


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """The text of one NewTokens."""

    text: str = ""
    stopped_after: int = NOT_STOPPED
    """Tokens of the sequence up to the one that completes its first stop string."""
    error: str = ""
    """Why there is no text."""


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """In the order of the NewTokens."""

    pieces: list[Piece]


ToWorker = Open | Close | Tokens
FromWorker = Ready | Pieces

encoder = msgspec.msgpack.Encoder()
to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
