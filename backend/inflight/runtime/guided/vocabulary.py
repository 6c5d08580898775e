"""The bytes of a checkpoint's tokens, as grammars need them, read from its tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from inflight.text.byte_tokens import ByteFallback, ByteLevel

WORD_START = "\u2581"
"""What SentencePiece writes for a space."""


@dataclass(frozen=True)
class Vocabulary:
    texts: tuple[bytes, ...]
    """Of each token of the model; empty for special tokens and padding, which no grammar allows."""
    tokenizer: tokenizers.Tokenizer
    special: dict[int, str]
    """Special tokens, with or without text."""

    @cached_property
    def num_bytes(self) -> npt.NDArray[np.int32]:
        """Of each token's text."""
        return np.array([len(text) for text in self.texts], dtype=np.int32)

    def showing(self, token_ids: Iterable[int]) -> Vocabulary:
        """The same with these special tokens as their text. Ids that are none are ignored."""
        shown = {each for each in token_ids if each in self.special and each < len(self.texts)}
        if not shown:
            return self
        texts = list(self.texts)
        for each in shown:
            texts[each] = self.special[each].encode()
        return replace(self, texts=tuple(texts))


def load_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """`vocab_size`: the model's, which may be more or less than the tokenizer's. Raises ValueError with the reason why
    the tokenizer cannot be used."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError("the checkpoint has no tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    kinds = [] if tokenizer.decoder is None else _kinds(json.loads(tokenizer.decoder.__getstate__()))
    added = tokenizer.get_added_tokens_decoder()
    if "ByteLevel" in kinds:
        read = ByteLevel().read
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        read = _read_with_fallback
    else:
        raise ValueError("the checkpoint's tokenizer writes its tokens in a way that no grammar can follow")
    texts = [b""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        if token_id < vocab_size:
            texts[token_id] = read(token)
    for token_id, each in added.items():
        if token_id < vocab_size:
            texts[token_id] = b"" if each.special else each.content.encode()
    special = {token_id: token.content for token_id, token in added.items() if token.special}
    return Vocabulary(tuple(texts), tokenizer, special)


def _read_with_fallback(token: str) -> bytes:
    found = ByteFallback().read(token)
    return token.replace(WORD_START, " ").encode() if found is None else found


def _kinds(part: dict[str, Any]) -> list[str]:
    """Types of a decoder's parts."""
    if part["type"] != "Sequence":
        return [part["type"]]
    return [kind for inner in part["decoders"] for kind in _kinds(inner)]
