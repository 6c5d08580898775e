"""The tensors of a GGUF file by the names that the checkpoint of transformers has for them. Reads none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.errors import ConfigurationError
from inflight.gguf.architectures import ARCHITECTURE, TOP, Architecture, find_architecture
from inflight.gguf.file import GgufFile, TensorInfo
from inflight.gguf.rotary import FACTORS

LAYER = re.compile(r"blk\.(\d+)\.(.+)", re.ASCII)
QUERIES, KEYS = "attn_q", "attn_k"


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a checkpoint of transformers, and what of the file it is."""

    info: TensorInfo
    num_heads: int = 0
    """Heads whose rows are in llama.cpp's order, in which the halves of a head alternate; 0 = rows are in order."""
    expert: int | None = None
    """Which matrix of the file's tensor it is; None = the whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.expert is None else self.info.shape[1:]


def named_tensors(file: GgufFile) -> dict[str, NamedTensor]:
    """A tensor that the architecture does not have keeps the name that it has in the file. Raises
    ConfigurationError."""
    architecture = find_architecture(file.metadata)
    return dict(found for info in file.tensors.values() for found in _named(file, architecture, info))


def _named(file: GgufFile, architecture: Architecture, info: TensorInfo) -> Iterator[tuple[str, NamedTensor]]:
    if info.name == FACTORS:  # in config.json
        return
    stem, dot, kind = info.name.rpartition(".")
    found = LAYER.fullmatch(stem)
    if kind not in ("weight", "bias") or not (found or stem in TOP):
        yield info.name, NamedTensor(info)
    elif found is None:
        yield f"{TOP[stem]}{dot}{kind}", NamedTensor(info)
    elif found[2] in architecture.experts:
        name = architecture.experts[found[2]]
        for expert in range(info.shape[0]):
            yield f"model.layers.{found[1]}.{name.format(expert=expert)}{dot}{kind}", NamedTensor(info, expert=expert)
    elif found[2] in architecture.layer_names:
        name = f"model.layers.{found[1]}.{architecture.layer_names[found[2]]}{dot}{kind}"
        yield name, NamedTensor(info, num_heads=_num_heads(file, architecture, found[2], info))
    else:
        yield info.name, NamedTensor(info)


def _num_heads(file: GgufFile, architecture: Architecture, name: str, info: TensorInfo) -> int:
    if not architecture.rotates_neighbours or name not in (QUERIES, KEYS):
        return 0
    prefix = f"{file.metadata.text(ARCHITECTURE)}.attention.head_count"
    num_heads = file.metadata.whole_of_all(prefix)
    if name == KEYS:
        num_heads = file.metadata.whole_of_all(f"{prefix}_kv", num_heads)
    num_rows = info.shape[0]
    if num_heads < 1 or num_rows % (2 * num_heads):
        raise ConfigurationError(f"{file.path}: the {num_rows} rows of {info.name} are not those of {num_heads} heads")
    return num_heads
