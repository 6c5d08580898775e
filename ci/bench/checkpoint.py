"""The checkpoint that is measured: a Llama with random bfloat16 weights, created if it is missing.

It has the shape of small language models that are served on CPUs. Its weights are meaningless, so lengths are forced.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB_SIZE = 49152
MAX_POSITIONS = 8192
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama whose heads have 64 elements."""

    hidden_size: int = 576
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    intermediate_size: int = 1536


SHAPES = {
    "135m": Shape(),
    "1b": Shape(hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, intermediate_size=8192),
}


def make_checkpoint(folder: Path, tokenizer: Path, shape: Shape = SHAPES["135m"]) -> Path:
    """The checkpoint in `folder`, with the tokenizer of another so that a server can load it; it is never used."""
    if not Path(folder, TOKENIZER_FILES[-1]).exists():
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds to import

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=64,
            intermediate_size=shape.intermediate_size,
            vocab_size=VOCAB_SIZE,
            tie_word_embeddings=True,
            max_position_embeddings=MAX_POSITIONS,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(Path(tokenizer, name), folder)
    return folder


def with_words(checkpoint: Path) -> Path:
    """The same checkpoint in a folder beside it, with a tokenizer in which every token has a text of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = checkpoint.with_name(f"{checkpoint.name}-words")
    folder.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        link = folder / file.name
        if file.name not in TOKENIZER_FILES and not link.exists():
            link.symlink_to(file.resolve())
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{number}" for number in range(VOCAB_SIZE - len(letters)))]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / TOKENIZER_FILES[0]))
    (folder / TOKENIZER_FILES[1]).write_text("{}")
    return folder
