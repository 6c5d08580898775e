"""The text and the bytes of single tokens, for those who list tokens one by one."""

from __future__ import annotations

from functools import cache

from inflight.text.byte_tokens import ByteLevel
from inflight.text.tokenizer import Tokenizer

BEFORE = "a"
"""A token that another is decoded behind: decoders drop the space of the first word."""


class TokenTexts:
    """Of one tokenizer. Thread safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = ByteLevel()
        self._num_before = len(tokenizer.join([BEFORE]))
        self.data = cache(self._data)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._tokenizer.special_ids

    def text(self, token_id: int) -> str:
        """Special tokens as they are written; bytes that are a part of a character as U+FFFD."""
        return self.data(token_id).decode("utf-8", "replace")

    def _data(self, token_id: int) -> bytes:
        """The bytes that the token stands for; none for an id without a token."""
        tokenizer = self._tokenizer
        token = tokenizer.token(token_id)
        if not token:
            return b""
        if self.is_special(token_id):
            return token.encode()
        if tokenizer.is_byte_level:
            return self._byte_level.read(token)
        part = tokenizer.byte_tokens.read(token)
        return tokenizer.join([BEFORE, token])[self._num_before :].encode() if part is None else part
