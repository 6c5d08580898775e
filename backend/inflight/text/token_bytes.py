"""How many bytes of a prompt one token can stand for, so that a prompt that must be too long is refused untokenised.

There is a bound only if the tokenizer drops no part of a text: not in the normalizer, not between words, not as an
unknown character, and no space beside an added token. A component that is not known to keep everything is taken to drop
something. Knows how a tokenizer describes itself; knows no prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from inflight.text.byte_tokens import ByteFallback, alphabet

NFC_SHRINK = 4
"""Composition makes UTF-8 at most 3.5 times shorter: U+0390 (2 bytes) may be written as three characters (7 bytes)."""
KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
"""Pre-tokenizers that split a text without dropping any of it."""
CUTTING = ("Split", "Punctuation")
"""Pre-tokenizers that keep the delimiter unless their `behavior` is "Removed"."""


def max_bytes_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """The most bytes of UTF-8 that one token of an encoded text can stand for; None if there is no known bound."""
    added = list(backend.get_added_tokens_decoder().values())
    pre_tokenizers = list(_parts(backend.pre_tokenizer))
    is_byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    letters = alphabet() if is_byte_level else ByteFallback.all_tokens()
    shrink = 1
    for part in _parts(backend.normalizer):
        shrink *= _shrink(part)
    if (
        not shrink
        or not all(map(_keeps_all, pre_tokenizers))
        or not _has_no_unknowns(backend.model, is_byte_level)
        or not vocabulary.keys() >= set(letters)
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    # A byte-level token is written with one character a byte.
    lengths = [len(token) if is_byte_level else len(token.encode()) for token in vocabulary]
    lengths += [len(token.content.encode()) for token in added]
    if backend.normalizer is not None:
        lengths += [len(backend.normalizer.normalize_str(token.content).encode()) for token in added]
    return max(lengths) * shrink


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The descriptions of the parts of a normalizer or pre-tokenizer."""
    if component is not None:
        yield from _flatten(json.loads(component.__getstate__()))


def _flatten(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers", []) + part.get("pretokenizers", []):
        yield from _flatten(inner)


def _shrink(normalizer: dict[str, Any]) -> int:
    """The factor by which it may shorten a text at most, in bytes; 0 = there is no bound."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return int(pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode()))
    return {"Prepend": 1, "NFC": NFC_SHRINK}.get(normalizer["type"], 0)


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in CUTTING:
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in KEEPING


def _has_no_unknowns(model: Any, is_byte_level: bool) -> bool:
    """Whether every character can be encoded, if the vocabulary holds all bytes.

    Not so for vocabularies that mark the position in a word: a byte may be there for one position only.
    """
    if not isinstance(model, tokenizers.models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    return is_byte_level or bool(model.byte_fallback)
