"""Which files of a model the engine reads, of all that its repository on the hub has. Never code, nor what would have
to be unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from inflight.checkpoint_files import CONFIG, INDEX, QUANTIZATION, SMALL_FILES, VOCABULARIES, WEIGHTS

DECISIVE = (CONFIG, QUANTIZATION, INDEX)
"""What shows whether the engine can serve the model, and which files hold its weights."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")
"""Weights in formats that are not read."""
NEVER = ("*.py", "*.bin", "*.pt", "*.pth")
"""Whatever else a name fits."""


class Unfit(Exception):
    """The files are no checkpoint that the engine reads; the message is a clause about the model."""


def decisive_files(names: Collection[str]) -> list[str]:
    """Of the files `names`. Raises Unfit."""
    has_gguf = any(fnmatchcase(name, "*.gguf") for name in names)
    instead = ", or name the path that hf download prints for one of its GGUF files" if has_gguf else ""
    if CONFIG not in names:
        raise Unfit(f"it has no config.json, so it is not a checkpoint of transformers: choose another model{instead}")
    if INDEX not in names and WEIGHTS not in names:
        other = next((name for pattern in PICKLED for name in sorted(names) if fnmatchcase(name, pattern)), "")
        found = f", only {other}" if other else ""
        raise Unfit(f"it has no safetensors weights{found}: choose a model that has {WEIGHTS} or {INDEX}{instead}")
    return [name for name in DECISIVE if name in names]


def small_files(names: Collection[str]) -> list[str]:
    """The other files that are read, but for weights."""
    return sorted(name for name in names if _fits(name, SMALL_FILES) and not _fits(name, NEVER))


def weight_files(folder: Path, names: Collection[str]) -> list[str]:
    """Those with weights; an index is read from `folder`. Raises Unfit."""
    if INDEX not in names:
        return [WEIGHTS]
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unfit(f"its {INDEX} is not a safetensors index") from None
    for shard in shards:
        is_name = isinstance(shard, str) and "/" not in shard and shard.isprintable()
        if not is_name or not shard.endswith(".safetensors"):
            raise Unfit(f"its {INDEX} names {shard!r}, which is no safetensors file of its folder")
        if shard not in names:
            raise Unfit(f"its {INDEX} names {shard}, which it does not have")
    return shards


def is_whole(folder: Path) -> bool:
    """Whether a folder has config.json, a tokenizer and every file with weights."""
    try:
        names = {path.name for path in folder.iterdir() if path.is_file()}
        decisive_files(names)
        weight_files(folder, names)
    except (OSError, Unfit):
        return False
    return any(_fits(name, VOCABULARIES) for name in names)


def _fits(name: str, patterns: Collection[str]) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns)
