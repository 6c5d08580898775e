"""Tokens to text, one token at a time, never showing a part of a character.

Whatever the grouping in which tokens arrive, the pieces put together are the same text. Two ways: byte-level tokens
(GPT-2, Llama 3, Qwen) are bytes and go through an incremental UTF-8 decoder; all others (SentencePiece style, where a
token's text depends on its neighbours) are decoded in a short window behind which lies text already shown.
"""

from __future__ import annotations

import codecs
from functools import cache
from typing import Protocol

from inflight.server.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 5
"""Prompt tokens before the first new one: enough to know whether it begins with a space."""
MAX_HELD_TOKENS = 8
"""A character has at most 4 bytes, so what is still incomplete after 8 tokens never becomes one."""


class TextDecoder(Protocol):
    """Text of one sequence as it grows."""

    def push(self, token_id: int) -> str:
        """The text that has become complete with this token; often empty."""

    def flush(self) -> str:
        """What is still held back, at the end of the sequence; incomplete bytes show as U+FFFD."""


def make_text_decoder(tokenizer: Tokenizer, prompt_ids: list[int]) -> TextDecoder:
    if tokenizer.is_byte_level:
        return ByteLevelDecoder(tokenizer)
    return WindowDecoder(tokenizer, prompt_ids)


class ByteLevelDecoder:
    """For tokens that are byte strings in disguise: each byte is written as one printable character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        token = self._tokenizer.token(token_id)
        return self._utf8.decode(_token_bytes(token)) if token else ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For tokens whose text depends on those before: decodes a window and shows what is new at its end."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._window = prompt_ids[-CONTEXT_TOKENS:]
        self._num_shown = len(self._window)
        self._shown = tokenizer.decode(self._window)

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        num_held = len(self._window) - self._num_shown
        text = self._tokenizer.decode(self._window)
        if text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._tokenizer.decode(self._window))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._window = self._window[self._num_shown :][-CONTEXT_TOKENS:] or self._window
        self._num_shown = len(self._window)
        self._shown = self._tokenizer.decode(self._window)
        return new


@cache
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for their own byte, the rest are moved up from U+0100."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in own}
    moved = (byte for byte in range(256) if byte not in own)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return table


@cache
def _token_bytes(token: str) -> bytes:
    """A token outside the alphabet (one that was added as plain text) stands for itself."""
    table = _bytes_of_characters()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode("utf-8")
