"""Tiny tokenizers, one for each kind of decoder."""

from __future__ import annotations

import functools
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from inflight.config import EngineConfig
from inflight.text.byte_tokens import alphabet
from inflight.text.tokenizer import Tokenizer

END = "<end>"
CORPUS = ["the cat sat on the mat and the dog ran away", "naïve café, größe 日本語 🙂 done", "a b c  d   e"]


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Token id = byte for the first 256; END is special and ends outputs."""
    return byte_tokenizer_with()


def checking_config(folder: Path) -> EngineConfig:
    """Of a front that checks guided answers, which it reads by a byte tokenizer in `folder`."""
    byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    return EngineConfig(gpt_model_path=str(folder), guided_decoding_check=True)


def byte_tokenizer_with(*special: str) -> Tokenizer:
    """The same with further special tokens."""
    vocab = {char: byte for byte, char in enumerate(alphabet())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, *special])
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def merged_byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with merges, so that tokens begin and end inside characters and words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, special_tokens=[END], show_progress=False),
    )
    return Tokenizer(backend, [backend.token_to_id(END)])


PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz.", "▁the", "▁cat", "▁sat", "日", "é"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_fallback(decoder: decoders.Decoder, normalizer: normalizers.Normalizer | None) -> Tokenizer:
    """SentencePiece's way: a space is a letter of the word behind it, unknown characters fall back to byte tokens."""
    vocab = {piece: index for index, piece in enumerate(["<unk>", END, *BYTES, *PIECES])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoder
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's, TinyLlama's and Mistral's layout: a text gets a space in front, which its decoder takes away."""
    fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _byte_fallback(decoders.Sequence(fuse), normalizers.Sequence(spaces))


@functools.cache
def gemma_tokenizer() -> Tokenizer:
    """The same without a space in front."""
    fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence(fuse), normalizers.Replace(" ", "▁"))


@functools.cache
def unigram_tokenizer() -> Tokenizer:
    """Unigram pieces, Metaspace and byte fallback."""
    vocab = [("<unk>", 0.0), *((piece, -5.0) for piece in [*BYTES, *PIECES])]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def wordpiece_tokenizer() -> Tokenizer:
    """BERT's way: words without their spaces, pieces inside a word begin with ##."""
    letters = "abcdefghijklmnopqrstuvwxyzé人."
    vocab = ["[UNK]", "the", "cat", *letters, *(f"##{letter}" for letter in letters)]
    model = models.WordPiece({piece: index for index, piece in enumerate(vocab)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def word_end_tokenizer() -> Tokenizer:
    """GPT-1's way: the last piece of a word says so, and brings a space if another word follows."""
    letters = "abcdefghijklmnopqrstuvwxyzé人."
    vocab = ["<unk>", "the</w>", "cat</w>", *letters, *(f"{letter}</w>" for letter in letters)]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(vocab)},
        merges=[],
        unk_token="<unk>",
        end_of_word_suffix="</w>",
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def stripped_byte_tokenizer() -> Tokenizer:
    """Bytes, and a decoder that takes a space off the beginning."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])


@functools.cache
def spaced_tokenizer() -> Tokenizer:
    """No decoder at all: tokens are words with a space between."""
    words = ["<unk>", *CORPUS[0].split(), "日本語", "🙂"]
    vocab = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([END])
    return Tokenizer(backend, [backend.token_to_id(END)])


EVERY_KIND = (
    byte_tokenizer,
    merged_byte_tokenizer,
    stripped_byte_tokenizer,
    sentencepiece_tokenizer,
    gemma_tokenizer,
    unigram_tokenizer,
    wordpiece_tokenizer,
    word_end_tokenizer,
    spaced_tokenizer,
)
