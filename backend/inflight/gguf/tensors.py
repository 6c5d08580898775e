"""The tensors of a GGUF file by the names that the checkpoint of transformers has for them. Reads none of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from inflight.errors import ConfigurationError
from inflight.gguf.architectures import ARCHITECTURE, find_architecture
from inflight.gguf.file import GgufFile, TensorInfo
from inflight.gguf.metadata import Metadata
from inflight.gguf.orders import Order, OrderOf, heads_of, turned_keys, turned_queries
from inflight.gguf.rotary import FACTORS

EMBEDDING = "token_embd.weight"
LAYER = re.compile(r"blk\.(\d+)\.(.+)", re.ASCII)
EXPERT = re.compile(r"(.+)\.(\d+)", re.ASCII)
"""Within a layer: in files of 2023 each expert has a tensor of its own."""
STACKED = "{}_exps"
"""What one tensor with all of them, of a dimension more, is called since."""
TURNED = {"attn_q": turned_queries, "attn_k": turned_keys}
LATENT_KEYS = "attn_k_b"
"""The matrix of each head that makes keys of latents, whose columns are rows in transformers."""
GATED_NORM = "ssm_norm"
DECAYS = "ssm_a"
VECTORS = frozenset({DECAYS, "ssm_d", GATED_NORM})
"""Matrices in some files, of as many elements."""
CONVOLUTIONS = frozenset({"ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv"})
"""Their weights have three dimensions, of which the one in the middle is 1; in files there may be fewer, or more."""


class Change(Enum):
    """What the file has of a tensor's numbers."""

    PLUS_ONE = auto()
    NEGATIVE_EXPONENTIAL = auto()
    """-exp of them."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a checkpoint of transformers, and what of the file it is."""

    info: TensorInfo
    shape: tuple[int, ...]
    """In transformers."""
    order: Order | None = None
    """Of the rows of the whole matrix, or the elements of a vector; None = the same in both."""
    column_order: Order | None = None
    expert: int | None = None
    """Which matrix of the file's tensor it is; None = the whole tensor."""
    part: int = 0
    """The first of its `span` of `num_parts` equal ones of the rows, in transformers' order."""
    span: int = 1
    num_parts: int = 1
    is_turned: bool = False
    """Whether each of several matrices has columns of the file as rows."""
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class JoinedTensors:
    """A tensor of a checkpoint of transformers that has the rows of several of the file's, for each of `num_turns`
    equal parts those of all of them."""

    tensors: tuple[NamedTensor, ...]
    num_turns: int = 1

    @property
    def info(self) -> TensorInfo:
        """Of the first."""
        return self.tensors[0].info

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:])


def named_tensors(file: GgufFile) -> dict[str, NamedTensor | JoinedTensors]:
    """A tensor that the architecture does not have keeps the name that it has in the file. Those of layers behind the
    last one that is computed are left out. Raises ConfigurationError."""
    return _Naming(file).all()


def num_computed_layers(metadata: Metadata) -> int:
    """Without those at the end that predict further tokens."""
    prefix = metadata.text(ARCHITECTURE)
    return metadata.whole(f"{prefix}.block_count") - metadata.whole(f"{prefix}.nextn_predict_layers", 0)


class _Naming:
    """Of one file's tensors."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = find_architecture(file.metadata)
        self._prefix = file.metadata.text(ARCHITECTURE)
        self._joined = {
            stem: (name, stems) for name, stems in self._architecture.joined_names.items() for stem in stems
        }

    def all(self) -> dict[str, NamedTensor | JoinedTensors]:
        num_layers = num_computed_layers(self._file.metadata)
        found: dict[str, NamedTensor | JoinedTensors] = {}
        for info in self._file.tensors.values():
            layer = LAYER.fullmatch(info.name)
            if info.name == FACTORS or (layer and int(layer[1]) >= num_layers):  # the factors are in config.json
                continue
            for name, tensor in self._of_layer(info, int(layer[1]), layer[2]) if layer else self._outside(info):
                if name in found:
                    raise ConfigurationError(
                        f"{self._file.path}: the tensors {found[name].info.name} and {info.name} are both {name} of "
                        "the model"
                    )
                found[name] = tensor
        return found

    def _outside(self, info: TensorInfo) -> Iterator[tuple[str, NamedTensor]]:
        stem, dot, kind = info.name.rpartition(".")
        name = self._architecture.top_names.get(stem)
        if name is None or kind not in ("weight", "bias"):
            yield info.name, NamedTensor(info, info.shape)
        else:
            yield f"{name}{dot}{kind}", self._tensor(info, stem)

    def _of_layer(self, info: TensorInfo, layer: int, inner: str) -> Iterator[tuple[str, NamedTensor | JoinedTensors]]:
        """`inner`: its name in the layer."""
        stem, dot, kind = inner.rpartition(".")
        if whole := self._architecture.whole_names.get(inner):
            yield f"{self._architecture.layers}.{layer}.{whole}", self._tensor(info, stem or inner)
            return
        named = self._by_stem(info, layer, stem, f"{dot}{kind}") if kind in ("weight", "bias") else ()
        is_named = False
        for name, tensor in named:
            is_named = True
            yield f"{self._architecture.layers}.{layer}.{name}{dot}{kind}", tensor
        if not is_named and stem not in self._joined:
            yield info.name, NamedTensor(info, info.shape)

    def _by_stem(
        self, info: TensorInfo, layer: int, stem: str, ending: str
    ) -> Iterator[tuple[str, NamedTensor | JoinedTensors]]:
        """Names without ending, relative to the layer; none for what the architecture does not have."""
        architecture, one = self._architecture, EXPERT.fullmatch(stem)
        if stem in self._joined:
            name, stems = self._joined[stem]
            tensors = self._joined_tensors(layer, stems, ending)
            if stem == stems[0]:
                yield name, tensors
        elif names := architecture.shared_names.get(stem):
            yield from self._parts(names, self._tensor(info, stem))
        elif names := architecture.names_by_heads.get(stem, ()):
            num_heads, num_key_heads = heads_of(self._file.metadata, self._prefix)
            yield from self._parts(names, self._tensor(info, stem), (num_heads, num_key_heads, num_key_heads))
        elif stem in architecture.experts and len(info.shape) == (3 if ending == ".weight" else 2):
            whole = NamedTensor(info, info.shape[1:])
            for expert in range(info.shape[0]):
                names = tuple(name.format(expert=expert) for name in architecture.experts[stem])
                yield from self._parts(names, replace(whole, expert=expert))
        elif one and len(of_one := architecture.experts.get(STACKED.format(one[1]), ())) == 1:
            yield of_one[0].format(expert=int(one[2])), NamedTensor(info, info.shape)
        elif stem in architecture.layer_names:
            yield architecture.layer_names[stem], self._tensor(info, stem)

    def _parts(
        self, names: Sequence[str], tensor: NamedTensor, spans: Sequence[int] = ()
    ) -> Iterator[tuple[str, NamedTensor]]:
        """Of the rows. `spans`: of how many equal ones each consists; empty = of one."""
        spans = spans or (1,) * len(names)
        num_rows, num_parts, part = tensor.shape[0], sum(spans), 0
        if num_rows % num_parts:
            raise ConfigurationError(
                f"{self._file.path}: the rows of {tensor.info.name} cannot be those of {num_parts} "
                f"{'matrices' if num_parts == len(names) else 'heads'}"
            )
        for name, span in zip(names, spans, strict=True):
            shape = (num_rows // num_parts * span, *tensor.shape[1:])
            yield name, replace(tensor, shape=shape, part=part, span=span, num_parts=num_parts)
            part += span

    def _joined_tensors(self, layer: int, stems: Sequence[str], ending: str) -> JoinedTensors:
        names = [f"blk.{layer}.{stem}{ending}" for stem in stems]
        if missing := set(names) - self._file.tensors.keys():
            raise ConfigurationError(f"{self._file.path}: of {', '.join(names)} there is no {min(missing)}")
        tensors = tuple(self._stacked(self._file.tensors[name], stem) for name, stem in zip(names, stems, strict=True))
        num_turns = {tensor.info.shape[0] for tensor in tensors if len(tensor.info.shape) == 3} or {1}
        if len(num_turns) > 1 or len({tensor.shape[1:] for tensor in tensors}) > 1:
            raise ConfigurationError(f"{self._file.path}: the tensors {', '.join(names)} have shapes that do not agree")
        return JoinedTensors(tensors, num_turns.pop())

    def _stacked(self, info: TensorInfo, stem: str) -> NamedTensor:
        """The rows of all its matrices."""
        *matrices, num_rows, num_columns = (1, *info.shape) if len(info.shape) == 1 else info.shape
        is_turned = stem == LATENT_KEYS
        if is_turned:
            num_rows, num_columns = num_columns, num_rows
        return NamedTensor(info, (math.prod(matrices) * num_rows, num_columns), is_turned=is_turned)

    def _tensor(self, info: TensorInfo, stem: str) -> NamedTensor:
        architecture, shape = self._architecture, info.shape
        if stem in VECTORS:
            before, behind = architecture.ones.get(stem, (0, 0))
            shape = (1,) * before + (math.prod(shape),) + (1,) * behind
        elif stem in architecture.rows:
            shape = (1, shape[-1])
        elif stem in CONVOLUTIONS and len(shape) > 1:
            shape = (math.prod(shape[:-1]), 1, shape[-1])
        turned = TURNED if architecture.rotates_neighbours else {}
        change = None
        if stem == DECAYS:
            change = Change.NEGATIVE_EXPONENTIAL
        elif architecture.adds_one and info.name.endswith("norm.weight") and stem != GATED_NORM:
            change = Change.PLUS_ONE
        return NamedTensor(
            info,
            shape,
            order=self._order({**turned, **architecture.orders}, stem, info, 0),
            column_order=self._order(architecture.column_orders, stem, info, -1),
            change=change,
        )

    def _order(self, orders: Mapping[str, OrderOf], stem: str, info: TensorInfo, axis: int) -> Order | None:
        if stem not in orders:
            return None
        order, size = orders[stem](self._file.metadata, self._prefix), info.shape[axis]
        if order.size != size:
            what = "columns" if axis else "rows"
            raise ConfigurationError(
                f"{self._file.path}: the {size} {what} of {info.name} are not the {order.size} that its metadata say"
            )
        return order
