"""Tells whether what a rank's weights are made of has changed, without reading it: the checkpoint, and the code that
lays weights out. Knows neither formats nor layouts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from inflight.config import EngineConfig
from inflight.score_tokens import find_score_tokens

CODE_OF_KERNELS = (("cpu",), ("cpu", "native"), ("cpu", "native", "isa"), ("matmul",))
"""Folders within inflight_kernels."""
ENDINGS = (".safetensors", ".gguf", ".json", ".py", ".h", ".cpp")


def weight_identity(config: EngineConfig) -> str:
    """A digest of the names, places, sizes and times of all files that decide the weights in memory, for one
    configuration. The time of change of an inode is among them, which a copy that keeps the others does not keep."""
    folders = [Path(config.gpt_model_path), *_code_of_layouts()]
    if config.speculative_model_dir:
        folders.append(Path(config.speculative_model_dir))
    checkpoint = Path(config.gpt_model_path)
    score_tokens = find_score_tokens(config.score_tokens, checkpoint, Path(config.tokenizer_dir or checkpoint))
    values = (config.quantization, config.cpu_activations, config.moe_expert_parallel_size, score_tokens)
    digest = hashlib.blake2b(f"{values}\0".encode(), digest_size=16)
    for part in _files(folders):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _code_of_layouts() -> Iterator[Path]:
    """Its folders, without importing it, which takes torch."""
    models = Path(__file__).parent / "models"
    yield from (models, models / "families", models / "formats", models.with_name("gguf"))
    kernels = importlib.util.find_spec("inflight_kernels")
    for location in (kernels and kernels.submodule_search_locations) or ():
        yield from (Path(location, *parts) for parts in CODE_OF_KERNELS)


def _files(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.glob("*")):
            if path.suffix in ENDINGS:
                try:
                    found = os.stat(path)
                except OSError:  # a link to nothing, or removed meanwhile
                    yield f"{path} -"
                    continue
                yield f"{path} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
