"""Two tokenizers small enough to see through: one token a byte, and a SentencePiece-style one with byte fallback."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from inflight.server.text_decoder import _bytes_of_characters
from inflight.server.tokenizer import Tokenizer

END = "<end>"
CORPUS = ["the cat sat on the mat and the dog ran away", "naïve café, größe 日本語 🙂 done", "a b c  d   e"]


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Token id = byte for the first 256; merges of CORPUS follow; END is special and ends outputs."""
    by_byte = {byte: char for char, byte in _bytes_of_characters().items()}
    vocab = {by_byte[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def merged_byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with merges, so that tokens begin and end inside characters and words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=[END], show_progress=False),
    )
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's way: a word begins with its space, unknown characters fall back to byte tokens."""
    pieces = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁the", "▁cat", "▁sat"]
    vocab = {piece: index for index, piece in enumerate([*pieces, *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])
