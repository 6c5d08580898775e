"""Which files of a model the engine reads, of all that its repository on the hub has. Never code, nor what would have
to be unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from inflight.checkpoint_files import CONFIG, INDEX, QUANTIZATION, SMALL_FILES, VOCABULARIES, WEIGHTS
from inflight.gguf.parts import ENDING, first_files, model_of, part_names

DECISIVE = (CONFIG, QUANTIZATION, INDEX)
"""What shows whether the engine can serve the model, and which files hold its weights."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")
"""Weights in formats that are not read."""
TAG = re.compile(r".*[.-](\w+)", re.ASCII)
"""At the end of what a GGUF file is called: its quantisation, as a rule."""
NEVER = ("*.py", "*.bin", "*.pt", "*.pth")
"""Whatever else a name fits."""


class Unfit(Exception):
    """The files are no checkpoint that the engine reads; the message is a clause about the model."""


def decisive_files(names: Collection[str]) -> list[str]:
    """Of the files `names`. Raises Unfit."""
    tags = _tags(first_files(names))
    instead = f", or one of its GGUF files, by a colon and a tag behind its name: {tags}" if tags else ""
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


def gguf_files(wanted: str, names: Collection[str]) -> list[str]:
    """All files of the model that `wanted` means, see ModelName.gguf, in their order. Raises Unfit."""
    models = first_files(names)
    if wanted.endswith(ENDING):
        found = [part_names(wanted)[0]] if wanted in names else []
    else:
        # Not as a part of another one: F16 is not in BF16, nor Q4_0 in Q4_0_4_4.
        tag = re.compile(rf"(?:^|[/._-]){re.escape(wanted)}[/.-]", re.IGNORECASE)
        found = [name for name in models if tag.search(name)]
    if not found and not models:
        raise Unfit("it has no GGUF file: leave out what stands behind its name, or choose another model")
    if not found:
        raise Unfit(f"none of its GGUF files has that in its name; behind the colon may stand {_tags(models)}")
    if len(found) > 1:
        raise Unfit(f"several of its GGUF files have that in their names; behind a slash name one: {', '.join(found)}")
    if {"", ".", ".."} & set(found[0].split("/")):
        raise Unfit(f"its {found[0]!r} is no file of its folder")
    parts = part_names(found[0])
    missing = [part for part in parts if part not in names]
    if missing:
        raise Unfit(f"it has not all {len(parts)} parts of {found[0]}: {missing[0]} is missing; choose another one")
    return parts


def find_gguf_files(wanted: str, folder: Path) -> list[str]:
    """The same of the files in a folder and below; none if they are not all there."""
    try:
        return gguf_files(wanted, {str(path.relative_to(folder)) for path in folder.rglob(f"*{ENDING}")})
    except (OSError, Unfit):
        return []


def _tags(models: Sequence[str]) -> str:
    """Of GGUF files, as they stand behind a model's name; in a list for people."""
    found = {tag[1] if (tag := TAG.fullmatch(name)) else name for name in map(model_of, models)}
    return ", ".join(sorted(found))


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
