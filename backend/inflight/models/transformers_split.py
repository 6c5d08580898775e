"""A rank's part of a network of transformers: found by the class's `tp_plan` before weights are read, then cut out of
those that were read. Knows no architecture.

Legend: T tokens, D hidden size, V vocabulary, U a rank's part of it, E experts, C = 2 I, or I without gates, I
intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.models.transformers_experts import ExpertKind, find_experts
from inflight.models.transformers_linears import linear_layers, sizes_of
from inflight.models.transformers_plan import (
    EXPERTS,
    KEY_LAYERS,
    LINEAR_STYLES,
    NO_EXPERTS,
    WHOLE_STYLES,
    ExpertShare,
    NotSplit,
    Share,
    Split,
    padded_part_of,
    part_of,
)


@dataclass(slots=True)
class NetworkSplit:
    """Of one rank; of a network that is not split nothing is filled in."""

    group: TensorParallelGroup = field(default_factory=TensorParallelGroup)
    linears: dict[str, Share] = field(default_factory=dict)
    """By the names of layers, the head included. Others are whole."""
    experts: dict[str, ExpertShare] = field(default_factory=dict)
    """By the names of modules of experts."""
    num_copies: dict[str, int] = field(default_factory=dict)
    """Ranks that have the same head of keys, by the names of modules that attend, where those are several."""
    vectors: dict[str, range] = field(default_factory=dict)
    """Of parameters with a number for each head, by their names."""
    embedding: tuple[str, range] | None = None
    """Name of the module, and this rank's rows of it."""

    @classmethod
    def of(cls, outline: Any, group: TensorParallelGroup, expert_parallel_size: int = 1) -> NetworkSplit:
        """`outline`: the network, without memory for its weights. `expert_parallel_size`: see ExpertShare. Raises
        NotSplit."""
        split = cls(group)
        if group.size == 1:
            return split
        modules = linear_layers(outline, with_tied=True)
        split.experts = {
            name: _share_of_experts(name, kind, group, expert_parallel_size)
            for name, kind in find_experts(outline).items()
        }
        if expert_parallel_size > 1 and not split.experts:
            raise NotSplit(f"moe_expert_parallel_size is {expert_parallel_size}, but it {NO_EXPERTS}")
        by_vocabulary = split._split_vocabulary(outline, modules)
        for name, style, module in _planned(outline, outline.named_modules()):
            if name in by_vocabulary or name in split.experts or style in WHOLE_STYLES:
                continue
            if style == EXPERTS:
                raise NotSplit(f"its tp_plan splits {name}, whose experts this engine does not compute")
            if style not in LINEAR_STYLES or name not in modules:
                raise NotSplit(f"its tp_plan has {style} for {name}, which is a {type(module).__name__}")
            kind, num_heads = LINEAR_STYLES[style], _num_key_heads(outline, name)
            if kind is Split.OUTPUTS and 0 < num_heads < group.size and group.size % num_heads == 0:
                split.num_copies[name.rpartition(".")[0]] = group.size // num_heads
                split.linears[name] = Share.of_key_heads(sizes_of(module), num_heads, group)
            else:
                split.linears[name] = Share.of(name, sizes_of(module), kind, group)
        for name, style, parameter in _planned(outline, outline.named_parameters()):
            if name.rpartition(".")[0] in split.experts:
                continue
            if LINEAR_STYLES.get(style) is not Split.OUTPUTS or parameter.dim() != 1:
                raise NotSplit(f"its tp_plan has {style} for {name}, which has {parameter.dim()} dimensions")
            split.vectors[name] = part_of(len(parameter), group, f"numbers of {name}")
        return split

    def _split_vocabulary(self, outline: Any, modules: dict[str, Any]) -> set[str]:
        """Note this rank's rows of embedding and head; the names of both. Every rank has all of them where other
        modules have the same weight, and of a head that is no linear layer."""
        found = [outline.get_input_embeddings(), outline.get_output_embeddings()]
        names = {name: module for name, module in outline.named_modules() if any(module is each for each in found)}
        weights = {f"{name}.weight" for name in names}
        tied = getattr(outline, "all_tied_weights_keys", {})
        shared = {name for pair in tied.items() if set(pair) & weights for name in pair}
        own = {name: each for name, each in names.items() if isinstance(each, nn.Embedding) or name in modules}
        if shared and not (shared <= weights and len(own) == len(names)):
            return set(names)
        for name, module in own.items():
            if isinstance(module, nn.Embedding):
                self.embedding = name, padded_part_of(len(module.weight), self.group)
            else:
                self.linears[name] = Share.of_head(sizes_of(module), self.group)
        return set(names)

    def cut(self, network: Any) -> None:
        """Leave of the parameters that were read what this rank has, and let it look up its part of embeddings."""
        if self.embedding is not None:
            name, rows = self.embedding
            embedding = network.get_submodule(name)
            _keep(embedding.weight, 0, rows)
            embedding.padding_idx = None  # of the whole table
            embedding.forward = SplitLookup(embedding.forward, rows, self.group)
        for name, share in self.linears.items():
            layer: Any = network.get_submodule(name)
            outputs, inputs = (1, 0) if isinstance(layer, Conv1D) else (0, 1)
            if isinstance(layer, nn.Linear | Conv1D):
                _keep(layer.weight, outputs, share.outputs)
                _keep(layer.weight, inputs, share.inputs)
            if layer.bias is not None:
                _keep(layer.bias, 0, share.outputs)
                layer.bias = layer.bias if share.has_bias else None
        for name, num_copies in self.num_copies.items():
            attention = network.get_submodule(name)
            attention.num_key_value_groups //= num_copies
        for name, part in self.vectors.items():
            _keep(network.get_parameter(name), 0, part)
        for name, experts in self.experts.items():
            for parameter, values in network.get_submodule(name).named_parameters(recurse=False):
                values.data = _of_experts(parameter, values.data, experts)


class SplitLookup:
    """In the place of the `forward` of an embedding: see VocabularyParallelEmbedding."""

    def __init__(self, own: Any, rows: range, group: TensorParallelGroup) -> None:
        """`own`: of the module, which has these rows alone."""
        self._own, self._rows, self._group = own, rows, group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """(…, T) to (…, T, D)"""
        places = token_ids - self._rows.start
        is_own = (places >= 0) & (places < len(self._rows))
        rows = self._own(torch.where(is_own, places, 0))
        return self._group.all_reduce(torch.where(is_own[..., None], rows, 0))


def _planned(outline: Any, parts: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Those that the plan has, with its style."""
    for name, part in parts:
        general = ".".join("*" if each.isdigit() else each for each in name.split("."))
        if (style := outline.tp_plan.get(general)) is not None:
            yield name, style, part


def _num_key_heads(outline: Any, name: str) -> int:
    """Heads of keys and values of the module that attends, of the layer of that name; 0 = it makes none, or nobody can
    say."""
    parent, _, ending = name.rpartition(".")
    attention = outline.get_submodule(parent)
    keys, size = getattr(attention, "k_proj", None), getattr(attention, "head_dim", None)
    if ending not in KEY_LAYERS or not isinstance(size, int) or not hasattr(attention, "num_key_value_groups"):
        return 0
    return 0 if keys is None else int(sizes_of(keys)[1] // size)


def _share_of_experts(
    name: str, kind: ExpertKind, group: TensorParallelGroup, expert_parallel_size: int
) -> ExpertShare:
    share = ExpertShare.of(name, kind.num_experts, kind.inner_size, group, expert_parallel_size)
    if not share.has_whole and (kind.is_transposed or kind.in_turn):
        raise NotSplit(
            f"of {name} gate and up take turns, or weights are transposed, and ranks have whole experts of such alone "
            f"(moe_expert_parallel_size {group.size})"
        )
    return share


def _of_experts(parameter: str, values: Tensor, share: ExpertShare) -> Tensor:
    """Of a parameter of all experts, (E, C, …) or (E, D, …), what this rank has. Of those that have an expert together
    the first one adds the last bias."""
    values = values[share.experts.start : share.experts.stop]
    if share.has_whole:
        return values
    own = slice(share.inner.start, share.inner.stop)
    match parameter:
        case "gate_up_proj" | "gate_up_proj_bias":
            return torch.cat([half[:, own] for half in values.chunk(2, 1)], 1)
        case "up_proj" | "up_proj_bias":
            return values[:, own].contiguous()
        case "down_proj":
            return values[:, :, own].contiguous()
        case "down_proj_bias" if own.start > 0:
            return torch.zeros_like(values)
    return values


def _keep(parameter: Tensor, dimension: int, part: range) -> None:
    """Once, of a parameter that several modules have; zeros behind its end."""
    num_all = parameter.shape[dimension]
    if num_all == len(part):
        return
    first, end = min(part.start, num_all), min(part.stop, num_all)
    own = parameter.data.narrow(dimension, first, end - first).contiguous()
    behind = (0, 0) * (parameter.dim() - 1 - dimension)
    missing = len(part) - (end - first)
    parameter.data = nn.functional.pad(own, (*behind, 0, missing)) if missing else own
