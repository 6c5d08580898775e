"""The tensors of a GGUF file by the names that the checkpoint of transformers has for them. Reads none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.errors import ConfigurationError
from inflight.gguf.architecture import Architecture
from inflight.gguf.architectures import ARCHITECTURE, find_architecture
from inflight.gguf.file import GgufFile, TensorInfo
from inflight.gguf.metadata import Metadata
from inflight.gguf.rotary import FACTORS

EMBEDDING = "token_embd.weight"
LAYER = re.compile(r"blk\.(\d+)\.(.+)", re.ASCII)
EXPERT = re.compile(r"(.+)\.(\d+)", re.ASCII)
"""Within a layer: in files of 2023 each expert has a tensor of its own."""
STACKED = "{}_exps"
"""What one tensor with all of them, of a dimension more, is called since."""
QUERIES, KEYS = "attn_q", "attn_k"
ROWS = frozenset({"ffn_gate_inp_shexp"})
"""Matrices of one row, which are vectors in some files."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a checkpoint of transformers, and what of the file it is."""

    info: TensorInfo
    num_heads: int = 0
    """Heads whose rows are in llama.cpp's order, in which the halves of a head alternate; 0 = rows are in order."""
    expert: int | None = None
    """Which matrix of the file's tensor it is; None = the whole tensor."""
    part: int = 0
    """Of the `num_parts` equal ones of the rows."""
    num_parts: int = 1
    is_row: bool = False
    """Whether it is a matrix of one row."""
    adds_one: bool = False
    """Whether the file has its elements plus 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.info.shape if self.expert is None else self.info.shape[1:]
        if self.is_row:
            return (1, *shape[-1:])
        return (shape[0] // self.num_parts, *shape[1:])


def named_tensors(file: GgufFile) -> dict[str, NamedTensor]:
    """A tensor that the architecture does not have keeps the name that it has in the file. Those of layers behind the
    last one that is computed are left out. Raises ConfigurationError."""
    architecture, num_layers = find_architecture(file.metadata), num_computed_layers(file.metadata)
    found: dict[str, NamedTensor] = {}
    for info in file.tensors.values():
        layer = LAYER.match(info.name)
        if layer and int(layer[1]) >= num_layers:
            continue
        for name, tensor in _named(file, architecture, info):
            if name in found:
                raise ConfigurationError(
                    f"{file.path}: the tensors {found[name].info.name} and {info.name} are both {name} of the model"
                )
            found[name] = tensor
    return found


def num_computed_layers(metadata: Metadata) -> int:
    """Without those at the end that predict further tokens."""
    prefix = metadata.text(ARCHITECTURE)
    return metadata.whole(f"{prefix}.block_count") - metadata.whole(f"{prefix}.nextn_predict_layers", 0)


def _named(file: GgufFile, architecture: Architecture, info: TensorInfo) -> Iterator[tuple[str, NamedTensor]]:
    if info.name == FACTORS:  # in config.json
        return
    stem, dot, kind = info.name.rpartition(".")
    found = LAYER.fullmatch(stem)
    if kind not in ("weight", "bias") or not (found or stem in architecture.top_names):
        yield info.name, NamedTensor(info)
    elif found is None:
        yield f"{architecture.top_names[stem]}{dot}{kind}", NamedTensor(info, adds_one=_adds_one(architecture, info))
    else:
        for name, tensor in _named_of_layer(file, architecture, info, found[2], f"{dot}{kind}"):
            yield name if name == info.name else f"model.layers.{found[1]}.{name}", tensor


def _named_of_layer(
    file: GgufFile, architecture: Architecture, info: TensorInfo, stem: str, ending: str
) -> Iterator[tuple[str, NamedTensor]]:
    """Names relative to the layer."""
    one = EXPERT.fullmatch(stem)
    if whole := architecture.whole_names.get(f"{stem}{ending}"):
        yield whole, NamedTensor(info)
    elif stem in architecture.experts and len(info.shape) == (3 if ending == ".weight" else 2):
        names = architecture.experts[stem]
        if info.shape[1] % len(names):
            raise ConfigurationError(f"{file.path}: the rows of {info.name} cannot be those of {len(names)} matrices")
        for expert in range(info.shape[0]):
            for part, name in enumerate(names):
                tensor = NamedTensor(info, expert=expert, part=part, num_parts=len(names))
                yield f"{name.format(expert=expert)}{ending}", tensor
    elif one and len(names := architecture.experts.get(STACKED.format(one[1]), ())) == 1:
        yield f"{names[0].format(expert=int(one[2]))}{ending}", NamedTensor(info)
    elif stem in architecture.layer_names:
        tensor = NamedTensor(
            info,
            num_heads=_num_heads(file, architecture, stem, info),
            is_row=stem in ROWS,
            adds_one=_adds_one(architecture, info),
        )
        yield f"{architecture.layer_names[stem]}{ending}", tensor
    else:
        yield info.name, NamedTensor(info)


def _adds_one(architecture: Architecture, info: TensorInfo) -> bool:
    return architecture.adds_one and info.name.endswith("norm.weight")


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
