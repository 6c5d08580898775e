"""Tokens to text, one token at a time, never showing a part of a character.

The text of an output is the text of prompt and output less the text of the prompt, both taken as far as their
characters are whole; bytes that no character is made of show as U+FFFD. So a character whose first bytes end the prompt
belongs to the output, and whatever the grouping in which tokens arrive, the pieces put together are the same text.

Byte-level tokens (GPT-2, Llama 3, Qwen) are bytes, and the text is those bytes. All others (Llama 2, Gemma, WordPiece)
go through the checkpoint's own decoder, which may strip or add a space by what stands before a token, and which turns
a whole run of byte tokens into U+FFFD if any of it is not UTF-8. So bytes are first gathered into characters, which
gives it runs that are always UTF-8; then each character and each other token is decoded behind the one before it.
"""

from __future__ import annotations

import codecs
from itertools import islice
from typing import Protocol

from inflight.text.byte_tokens import ByteLevel
from inflight.text.tokenizer import Tokenizer

PROMPT_TOKENS = 8
"""Text tokens at a prompt's end that tell what an output continues: at most 3 begin a character, 4 make up another."""


class TextDecoder(Protocol):
    """Text of one sequence as it grows."""

    def push(self, token_id: int) -> str:
        """The text that has become complete with this token; often empty."""

    def flush(self) -> str:
        """What is still held back, at the end of the sequence; incomplete bytes show as U+FFFD."""


def make_text_decoder(tokenizer: Tokenizer, prompt_ids: list[int]) -> TextDecoder:
    """A decoder of what follows `prompt_ids`."""
    decoder = ByteLevelDecoder(tokenizer) if tokenizer.is_byte_level else NeighbourDecoder(tokenizer)
    text_ids = (token_id for token_id in reversed(prompt_ids) if token_id not in tokenizer.special_ids)
    for token_id in reversed(list(islice(text_ids, PROMPT_TOKENS))):
        decoder.push(token_id)
    return decoder


def prompt_text(tokenizer: Tokenizer, prompt_ids: list[int]) -> str:
    """What stands before the first text of a decoder that is made for this prompt."""
    return "".join(map(make_text_decoder(tokenizer, []).push, prompt_ids))


class ByteLevelDecoder:
    """For tokens that are bytes, put together and nothing else."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._read = ByteLevel().read
        self._utf8 = codecs.getincrementaldecoder("utf-8")(ByteLevel.errors)

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        token = self._tokenizer.token(token_id)
        return self._utf8.decode(self._read(token)) if token else ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class NeighbourDecoder:
    """For tokens whose text depends on the token before. Some or all of them may be bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.byte_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._bytes.errors)
        self._before: list[str] = []
        """What was shown last, a token or the bytes of characters; empty at the start of the text."""

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
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
