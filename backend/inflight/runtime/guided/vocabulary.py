"""The bytes of a checkpoint's tokens, as XGrammar needs them, read from its tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import xgrammar


@dataclass(frozen=True, slots=True)
class Vocabulary:
    info: xgrammar.TokenizerInfo
    tokenizer: tokenizers.Tokenizer
    num_bytes: npt.NDArray[np.int32]
    """Of each token's text; 0 for special tokens and padding."""

    def showing(self, token_ids: Iterable[int]) -> Vocabulary:
        """The same with these special tokens as their text. Ids that are none are ignored. Takes 0.1 s of a vocabulary
        of 128,000."""
        added = self.tokenizer.get_added_tokens_decoder()
        special = {each: token.content for each, token in added.items() if token.special}
        shown = {each: special[each] for each in token_ids if each in special and each < len(self.num_bytes)}
        if not shown:
            return self
        # With their bytes as they are: how the vocabulary spells bytes no longer matters.
        tokens = self.info.decoded_vocab
        for each, text in shown.items():
            tokens[each] = text.encode()
        return _of(tokens, xgrammar.VocabType.RAW, self.tokenizer, [each for each in special if each not in shown])


def load_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """`vocab_size`: the model's, which may be more or less than the tokenizer's.

    A special token spells no text: it is given no bytes, so that no grammar allows it. Raises ValueError with the
    reason why the tokenizer cannot be used.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError("the checkpoint has no tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(path))
    kinds = [] if backend.decoder is None else _kinds(json.loads(backend.decoder.__getstate__()))
    if "ByteLevel" in kinds:
        vocab_type = xgrammar.VocabType.BYTE_LEVEL
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        vocab_type = xgrammar.VocabType.BYTE_FALLBACK
    else:
        raise ValueError("the checkpoint's tokenizer writes its tokens in a way that no grammar can follow")
    tokens = [""] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id] = token
    special = [token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special]
    for token_id in special:
        if token_id < vocab_size:
            tokens[token_id] = ""
    return _of(tokens, vocab_type, backend, special)


def _of(
    tokens: list[str] | list[bytes],
    vocab_type: xgrammar.VocabType,
    tokenizer: tokenizers.Tokenizer,
    special: list[int],
) -> Vocabulary:
    """`special`: those without text."""
    # The library wants an end token; each matcher gets its request's own.
    info = xgrammar.TokenizerInfo(tokens, vocab_type, vocab_size=len(tokens), stop_token_ids=special[:1])
    num_bytes = np.array([len(text) for text in info.decoded_vocab], dtype=np.int32)
    return Vocabulary(info, tokenizer, num_bytes)


def _kinds(part: dict[str, Any]) -> list[str]:
    """Types of a decoder's parts."""
    if part["type"] != "Sequence":
        return [part["type"]]
    return [kind for inner in part["decoders"] for kind in _kinds(inner)]
