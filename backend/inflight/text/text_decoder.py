"""Tokens to text, one token at a time, in whole characters.

The text of an output is the text of prompt and output without the text of the prompt, both cut after their last
complete character; invalid bytes become U+FFFD. So a character whose first bytes end the prompt belongs to the output,
and the pieces joined are the same text however the tokens were grouped.

Byte-level tokens (GPT-2, Llama 3, Qwen) are bytes, and their concatenation is the text. All others (Llama 2, Gemma,
WordPiece) go through the checkpoint's own decoder, which may strip or add a space depending on the token before, and
which turns a whole run of byte tokens into U+FFFD if any part of it is not UTF-8. Bytes are therefore first gathered
into characters, so that the decoder only gets runs that are valid UTF-8; then each character and each other token is
decoded together with the one before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Container
from encodings.utf_8 import IncrementalDecoder
from itertools import islice
from typing import Protocol

from inflight.text.byte_tokens import ByteLevel
from inflight.text.tokenizer import Tokenizer

PROMPT_TOKENS = 8
"""How many of the prompt's last text tokens are decoded before the output: up to 3 may be the start of an incomplete
character, and up to 4 the character before it."""


class TextDecoder(Protocol):
    """Decodes one sequence as it grows."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""

    def flush(self) -> str:
        """The text that is still held back, at the end of the sequence. Incomplete characters become U+FFFD."""


def make_text_decoder(
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    *,
    shows_special: bool = False,
    shown: frozenset[int] = frozenset(),
) -> TextDecoder:
    """A decoder for the tokens that follow `prompt_ids`. `shows_special`: whether special tokens have text; `shown`:
    those that have it anyway."""
    hidden = frozenset[int]() if shows_special else tokenizer.special_ids - shown
    kind = ByteLevelDecoder if tokenizer.is_byte_level else NeighbourDecoder
    decoder: TextDecoder = kind(tokenizer, hidden)
    text_ids = (token_id for token_id in reversed(prompt_ids) if token_id not in hidden)
    for token_id in reversed(list(islice(text_ids, PROMPT_TOKENS))):
        decoder.push(token_id)
    return decoder


def prompt_text(tokenizer: Tokenizer, prompt_ids: list[int]) -> str:
    """The text of the prompt, up to where the text of a decoder made for this prompt begins."""
    return "".join(map(make_text_decoder(tokenizer, []).push, prompt_ids))


class ByteLevelDecoder:
    """For tokenizers whose text is the concatenation of the tokens' bytes."""

    __slots__ = ("_hidden", "_read", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, hidden: Container[int]) -> None:
        """`hidden`: tokens without text."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._read = ByteLevel().read
        self._utf8 = IncrementalDecoder(ByteLevel.errors)

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if not self._utf8.buffer and (text := self._tokenizer.whole_text(token_id)) is not None:
            return text
        token = self._tokenizer.token(token_id)
        return self._utf8.decode(self._read(token)) if token else ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class NeighbourDecoder:
    """For tokenizers where a token's text depends on the token before. Tokens may be bytes."""

    def __init__(self, tokenizer: Tokenizer, hidden: Container[int]) -> None:
        """`hidden`: tokens without text."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._bytes = tokenizer.byte_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._bytes.errors)
        self._before: list[str] = []
        """What was decoded last: a token, or the byte tokens of one or more characters; empty at the start."""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        token = self._tokenizer.token(token_id)
        if not token:
            return ""
        part = self._bytes.read(token)
        if part is None:
            return self.flush() + self._show([token])
        return self._show_characters(self._utf8.decode(part))

    def flush(self) -> str:
        return self._show_characters(self._utf8.decode(b"", final=True))

    def _show_characters(self, characters: str) -> str:
        return self._show(self._bytes.write(characters)) if characters else ""

    def _show(self, tokens: list[str]) -> str:
        num_shown = len(self._tokenizer.join(self._before))
        text = self._tokenizer.join(self._before + tokens)
        self._before = tokens
        return text[num_shown:]
