"""The files of a checkpoint's folder that are read, by name. Reads none of them.

What is no file in the place of one (a FIFO, a device, a folder) is refused before anything opens it, which might wait
for ever.
"""

from __future__ import annotations

import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path

from inflight.errors import ConfigurationError

CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
GGUF = "model.gguf"
"""Link to a GGUF file, in the folder that was made of its metadata."""
GGUF_PARTS = "model-*-of-*.gguf"
"""Likewise to the parts behind the first one, of a model in several files."""
TOKENIZER = "tokenizer.json"
VOCABULARIES = (TOKENIZER, "*.model", "vocab*.*", "*.tiktoken", "tekken.json")
"""Files with a tokenizer's vocabulary. tokenizer_config.json has none."""
TEMPLATES = "additional_chat_templates"
MODULES = "modules.json"
"""Which parts sentence-transformers makes a model's vectors or scores with."""
POOLING = "1_Pooling/config.json"
PROMPTS = "config_sentence_transformers.json"
LOGIT_SCORE = "1_LogitScore/config.json"
"""Tokens by whose logits a language model scores texts."""
SMALL_FILES = (
    MODULES,
    POOLING,
    PROMPTS,
    LOGIT_SCORE,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    f"{TEMPLATES}/*.jinja",
    *VOCABULARIES,
)
READ = (CONFIG, QUANTIZATION, INDEX, *SMALL_FILES, "*.safetensors", GGUF, GGUF_PARTS)


def check_files(folder: str | Path) -> None:
    """Raise ConfigurationError if something with the name of a file that is read is none. What is missing, or a link to
    nothing, is left to whoever reads it."""
    for name in _names(folder):
        try:
            mode = os.stat(os.path.join(folder, name)).st_mode
        except OSError:
            continue
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise ConfigurationError(f"{os.path.join(folder, name)} is {what} where a file is expected")


def _names(folder: str | Path) -> list[str]:
    """Of what is read in the folder and in those below it."""
    below = sorted({pattern.rpartition("/")[0] for pattern in READ} - {""})
    names = [*_list(folder), *(f"{each}/{name}" for each in below for name in _list(os.path.join(folder, each)))]
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in READ))


def _list(folder: str | Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
