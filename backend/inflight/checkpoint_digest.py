"""Digests of what decides an engine's tokens: by one, parts of a request that travel find out whether they fit; the
other tells clients whether equal requests may have other tokens now."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from inflight.engine_description import EngineDescription

DIGEST_BYTES = 8
TAIL_BYTES = 2**16
"""Of each file of a checkpoint that are read: all of its config.json, and of its weights enough to tell two trainings
apart without reading gigabytes."""
FILES = ("*.json", "*.safetensors", "*.gguf", "*.model", "*.txt")
"""Of a checkpoint and of its tokenizer."""

ALIKE = ("checkpoint", "num_ranks", "data_parallel_size")
"""Fields of EngineDescription on which no bit of a logit depends: a folder's name, and how many replicas there are."""
ROUNDED_CACHES = ("fp8", "int8")
"""Of kv_cache_dtype."""
FINGERPRINT_BYTES = 6


@functools.lru_cache(maxsize=4)
def system_fingerprint(folders: tuple[str, ...], description: EngineDescription) -> str:
    """Of the files in the folders of the checkpoint and the tokenizer, and of all else that may change a bit of a
    logit: device, data types, layers, how ranks share them, versions. With the same of these it outlives every
    start."""
    decisive = {name: value for name, value in structs.asdict(description).items() if name not in ALIKE}
    digest = hashlib.blake2b(repr(decisive).encode(), digest_size=FINGERPRINT_BYTES)
    digest.update(checkpoint_digest(folders, description))
    return f"fp_{digest.hexdigest()}"


def checkpoint_digest(folders: Sequence[str], description: EngineDescription) -> bytes:
    """Of device, data types, and the ends of the files in the folders of the checkpoint and the tokenizer. The same on
    every machine with the same files.

    Sums that are rounded more coarsely than float32's also follow what adds them up: the layers and their order,
    whether they are deterministic, and how many ranks share a layer and its experts. So does what 8 bits round: keys
    and values, or activations. Weights may be quantised as they are read, and activations as they are multiplied."""
    decisive: tuple[object, ...] = (description.device, description.dtype)
    rounds_keys = description.kv_cache_dtype in ROUNDED_CACHES
    if rounds_keys:
        decisive += (description.kv_cache_dtype,)
    if rounds_keys or description.weight_dtype == "fp8" or description.dtype != "float32":
        decisive += (description.layers, description.deterministic)
        decisive += (description.tensor_parallel_size, description.moe_expert_parallel_size)
    if description.weight_dtype not in ("", description.dtype):
        decisive += (description.weight_dtype,)
    if description.sum_order:
        decisive += (description.sum_order,)
    if description.activations:
        decisive += ("times", description.activations)
    digest = hashlib.blake2b(repr(decisive).encode(), digest_size=DIGEST_BYTES)
    for folder in dict.fromkeys(filter(None, folders)):
        for path in sorted(path for pattern in FILES for path in Path(folder).glob(pattern)):
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - TAIL_BYTES, 0))
                digest.update(f"{path.name} {size} ".encode() + file.read())
    return digest.digest()
