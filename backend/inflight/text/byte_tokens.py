"""Tokens that stand for bytes, in the two ways in which vocabularies write them.

The bytes of one token may be only a part of a character. Knows single tokens, nothing of streams.
"""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import Protocol

EACH_BYTE = "inflight-each-byte"
"""Name of a codec error handler that decodes each invalid byte as U+FFFD."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


class ByteTokens(Protocol):
    """One way to write bytes as tokens."""

    errors: str
    """Codec error handler that decodes invalid UTF-8 as the tokenizers library does."""

    def read(self, token: str) -> bytes | None:
        """The bytes of a token; None for one that is text."""

    def write(self, text: str) -> list[str]:
        """The tokens of a text's bytes, whether or not the vocabulary has them."""


class ByteLevel:
    """The way of GPT-2: every token is a string of bytes, each written as one printable character."""

    errors = "replace"

    def read(self, token: str) -> bytes:
        """A token outside the alphabet (one that was added as plain text) stands for itself."""
        return _read_byte_level(token)

    def write(self, text: str) -> list[str]:
        return ["".join(alphabet()[byte] for byte in text.encode())]


class ByteFallback:
    """The way of SentencePiece: characters that the vocabulary lacks are split into bytes, written as `<0xE4>`."""

    errors = EACH_BYTE

    def read(self, token: str) -> bytes | None:
        return bytes.fromhex(token[3:5]) if _BYTE.fullmatch(token) else None

    def write(self, text: str) -> list[str]:
        return [_fallback_token(byte) for byte in text.encode()]

    @staticmethod
    def all_tokens() -> list[str]:
        """The 256 tokens that a vocabulary needs so that no character is unknown."""
        return [_fallback_token(byte) for byte in range(256)]


def _fallback_token(byte: int) -> str:
    return f"<0x{byte:02X}>"


_BYTE = re.compile("<0x[0-9a-fA-F]{2}>")


class NoBytes:
    """Every token is text."""

    errors = "strict"

    def read(self, token: str) -> None:
        return None

    def write(self, text: str) -> list[str]:
        return [text]


@cache
def alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 bytes stand for themselves, the others are numbered from
    U+0100 on."""
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(moved)) for byte in range(256)]


@cache
def _byte_of() -> dict[str, int]:
    return {char: byte for byte, char in enumerate(alphabet())}


@cache
def _read_byte_level(token: str) -> bytes:
    table = _byte_of()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode()
