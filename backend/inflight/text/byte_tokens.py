"""Tokens that are bytes: the two ways in which vocabularies write them.

Such a token may be a part of a character only. Knows single tokens, nothing of texts that grow.
"""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import Protocol

EACH_BYTE = "inflight-each-byte"
"""Error handler: one U+FFFD for each wrong byte."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


class ByteTokens(Protocol):
    """One way to write them."""

    errors: str
    """Error handler that shows bytes which are not UTF-8 as the tokenizers library does."""

    def read(self, token: str) -> bytes | None:
        """The bytes of a token; None for one that is text."""

    def write(self, text: str) -> list[str]:
        """Tokens of these bytes, whether or not a vocabulary has them."""


class ByteLevel:
    """GPT-2's: every token is a string of bytes, each written as one printable character."""

    errors = "replace"

    def read(self, token: str) -> bytes:
        """A token outside the alphabet (one that was added as plain text) stands for itself."""
        return _read_byte_level(token)

    def write(self, text: str) -> list[str]:
        return ["".join(alphabet()[byte] for byte in text.encode())]


class ByteFallback:
    """SentencePiece's: characters that the vocabulary lacks are bytes, written as `<0xE4>`."""

    errors = EACH_BYTE

    def read(self, token: str) -> bytes | None:
        return bytes.fromhex(token[3:5]) if _BYTE.fullmatch(token) else None

    def write(self, text: str) -> list[str]:
        return [_fallback_token(byte) for byte in text.encode()]

    @staticmethod
    def all_tokens() -> list[str]:
        """Those that a vocabulary must have lest a character be unknown."""
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
    """GPT-2's character of each byte: printable Latin-1 stands for itself, the rest is moved up from U+0100."""
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
