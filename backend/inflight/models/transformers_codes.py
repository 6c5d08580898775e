"""Which weights of a network of transformers are codes in the checkpoint, or become codes as they are read: those of
linear layers, and of experts that this engine computes. They get no memory for floats. Knows no architecture.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.coded import CodedFormat
from inflight.models.formats.format import Block, Target
from inflight.models.formats.on_load import HEAD_CODES, OnLoadFormat
from inflight.models.replaced_experts import ReplacedExperts, StoredExperts
from inflight.models.replaced_linear import ReplacedLinear
from inflight.models.transformers_experts import ExpertKind, find_experts, replace_with
from inflight.models.transformers_linears import linear_layers, replace_linear, sizes_of
from inflight.models.transformers_plan import ExpertShare, Share, expert_counts
from inflight.models.transformers_split import NetworkSplit
from inflight_kernels import Inputs
from inflight_kernels.cpu import STEP
from inflight_kernels.moe import ExpertWeights

logger = logging.getLogger(__name__)

JOINED = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
"""How transformers makes one parameter of experts' weights: those of each part one above the other."""


@dataclass(frozen=True, slots=True)
class CodedLayer:
    """A linear layer of a network that is codes in the checkpoint, or is to become codes."""

    block: Block
    weight_format: CodedFormat
    share: Share
    is_head: bool


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The layers of the checkpoint that are the weights of a module of experts."""

    kind: ExpertKind
    share: ExpertShare | None
    """None = all of them."""
    layers: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """By the module's parameter, expert, and place among the parts that this is made of."""

    @property
    def is_complete(self) -> bool:
        first, experts = self.kind.num_first, range(self.kind.num_experts)
        parts = [*((self.kind.first, part) for part in range(first)), ("down_proj", 0)]
        return self.layers.keys() == {(name, expert, part) for name, part in parts for expert in experts}

    @property
    def own(self) -> range:
        """Numbers of this rank's experts."""
        return range(self.kind.num_experts) if self.share is None else self.share.experts

    def blocks(self) -> list[list[list[Block]]]:
        """Of gate and up, and of down: those of each expert, which all ranks check."""
        kind, experts = self.kind, range(self.kind.num_experts)
        outer, inner = range(kind.size), range(kind.inner_size) if self.share is None else self.share.inner
        sizes = {"num_outputs": kind.inner_size, "num_inputs": kind.size}

        def of(name: str, num_parts: int, **place: Any) -> list[list[Block]]:
            names = [[self.layers[name, expert, part] for part in range(num_parts)] for expert in experts]
            return [[Block(name=each, **place) for each in of_one] for of_one in names]

        first = of(kind.first, kind.num_first, **sizes, outputs=inner, inputs=outer)
        sizes = {"num_outputs": kind.size, "num_inputs": kind.inner_size}
        return [first, of("down_proj", 1, **sizes, outputs=outer, inputs=inner)]


class CodedLayers:
    """Those of a network, by the names of its modules; and of the checkpoint's other layers of codes, their floats."""

    def __init__(
        self,
        outline: Any,
        checkpoint: Checkpoint,
        weight_format: CodedFormat,
        split: NetworkSplit,
        *,
        keeps_codes: bool,
    ) -> None:
        """`outline`: the network, without memory for its weights. `keeps_codes`: whether C++ multiplies codes. If not,
        experts of floats stay so."""
        self._checkpoint, self._weight_format = checkpoint, weight_format
        self._names: set[str] = set()
        """Tensors of the checkpoint that are not what a network's own loading code expects."""
        self._floats: dict[str, FloatsOfCodes] = {}
        self.of_modules: dict[str, CodedLayer] = {}
        self.of_experts: dict[str, ExpertParts] = {}
        modules = linear_layers(outline)
        head = outline.get_output_embeddings()
        is_made = isinstance(weight_format, OnLoadFormat)
        routers, source = expert_counts(outline.config), _Sources(outline)
        experts = {} if is_made and not keeps_codes else _joined_experts(outline, split)
        for layer in weight_format.layers(checkpoint):
            origin = source.of(layer)
            if (parts := experts.get(origin.module)) is not None and origin.part >= 0:
                parts.layers[origin.parameter, origin.expert, origin.part] = layer
                continue
            module = modules.get(origin.module) if origin.parameter == "weight" and origin.part < 0 else None
            share = None if module is None else split.linears.get(origin.module) or Share.whole(*sizes_of(module))
            is_float = is_made and share is not None and (share.num_outputs in routers or len(share.inputs) % STEP > 0)
            if share is None or share.is_padded or is_float:
                if not is_made:
                    self._add_floats(layer, weight_format)
                continue
            own_format: CodedFormat = weight_format
            if isinstance(weight_format, OnLoadFormat) and module is head:
                own_format = replace(weight_format, code=HEAD_CODES.get(weight_format.code, weight_format.code))
            block = _block(layer, share, transposed=is_made and isinstance(module, Conv1D))
            self.of_modules[origin.module] = CodedLayer(block, own_format, share, module is head)
            self._names |= _tensors_of(checkpoint, layer)
        for name, parts in experts.items():
            if parts.is_complete and not (is_made and parts.kind.size % STEP):
                self.of_experts[name] = parts
                self._names |= {tensor for layer in parts.layers.values() for tensor in _tensors_of(checkpoint, layer)}
            elif not is_made:
                for layer in parts.layers.values():
                    self._add_floats(layer, weight_format)

    def _add_floats(self, layer: str, weight_format: CodedFormat) -> None:
        num_outputs, num_inputs = weight_format.shape_of_layer(self._checkpoint, layer)
        block = _block(layer, Share.whole(num_inputs, num_outputs))
        self._names |= _tensors_of(self._checkpoint, layer)
        self._floats[f"{layer}.weight"] = FloatsOfCodes(self._checkpoint, weight_format, block)

    def slices(self, ignored: tuple[str, ...]) -> dict[str, Any]:
        """What the network's own loading code is to read: all that is no codes, and floats of codes that are no layer
        of their own in the network."""
        if self._floats:
            logger.warning(
                "%d quantised weights become floats: transformers' code joins them with others as it loads them",
                len(self._floats),
            )
        return {**self._checkpoint.slices(ignored, self._names), **self._floats}

    def class_without(self, network_class: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """`network_class` whose networks have ReplacedLinears and ReplacedExperts without weights in the place of these
        layers."""
        layers, experts = self.of_modules, self.of_experts

        def init(network: Any, *arguments: Any, **options: Any) -> None:
            network_class.__init__(network, *arguments, **options)
            for name, layer in layers.items():
                replace_linear(network, name, network.get_submodule(name), dtype, device, layer.share)
            for name, parts in experts.items():
                replace_with(network, name, parts.kind, dtype, parts.share)

        # transformers finds a class's ways of loading by its name.
        own = {"__init__": init, "__module__": network_class.__module__}
        return type(network_class.__name__, (network_class,), own)

    def put_into(self, network: nn.Module, target: Target) -> None:
        """Read them. Raises ConfigurationError."""
        for name, layer in self.of_modules.items():
            module = network.get_submodule(name)
            assert isinstance(module, ReplacedLinear)
            own = replace(target, inputs=Inputs.KEPT) if layer.is_head else target
            # C++ reads inputs in steps.
            own = replace(own, keeps_codes=target.keeps_codes and len(layer.block.inputs) % STEP == 0)
            module.put(layer.weight_format.read(self._checkpoint, [layer.block], own))
        num_floats = 0
        for name, parts in self.of_experts.items():
            own = replace(target, keeps_codes=target.keeps_codes and parts.kind.size % STEP == 0)
            gate_up, down = (self._read_experts(blocks, parts.own, own) for blocks in parts.blocks())
            experts = network.get_submodule(name)
            assert isinstance(experts, ReplacedExperts)
            experts.put(StoredExperts(gate_up_ECD=gate_up, down_EDI=down, activation=parts.kind.activation))
            num_floats += isinstance(gate_up, Tensor)
        if num_floats and target.device.type == "cuda":
            logger.warning("the quantised experts of %d layers become floats: no GPU multiplies them", num_floats)

    def _read_experts(self, blocks: Sequence[Sequence[Block]], own: range, target: Target) -> ExpertWeights:
        for number, of_one in enumerate(blocks):
            if number not in own:
                for block in of_one:
                    self._weight_format.check(self._checkpoint, block)
        return self._weight_format.read_experts(self._checkpoint, blocks[own.start : own.stop], target)


class FloatsOfCodes:
    """In the place of a safetensors slice: a weight of codes as the floats that they mean."""

    def __init__(self, checkpoint: Checkpoint, weight_format: CodedFormat, block: Block) -> None:
        self._checkpoint, self._weight_format, self._block = checkpoint, weight_format, block

    def get_shape(self) -> list[int]:
        return list(self._block.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        self._weight_format.check(self._checkpoint, self._block)
        return self._weight_format.dequantized(self._checkpoint, [self._block])[index]


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a layer of the checkpoint is in the network."""

    module: str = ""
    """Empty: nothing that is known here."""
    parameter: str = ""
    expert: int = -1
    part: int = -1
    """Place among the parts of an expert that transformers joins to the parameter; negative = it is the parameter."""


class _Sources:
    """What layers of the checkpoint are in a network, as transformers' loading code renames and joins them."""

    def __init__(self, outline: Any) -> None:
        mapping = get_model_conversion_mapping(outline)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._of_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._prefix, self._state = outline.base_model_prefix, outline.state_dict()

    def of(self, layer: str) -> _Origin:
        key, pattern = rename_source_key(
            f"{layer}.weight", self._renamings, self._converters, self._prefix, self._state
        )
        if key not in self._state:
            return _Origin()
        module, _, parameter = str(key).rpartition(".")
        if pattern is None:
            return _Origin(module, parameter)
        converter, numbers = self._of_pattern[pattern], [part for part in layer.split(".") if part.isdigit()]
        if [(type(each), getattr(each, "dim", None)) for each in converter.operations] not in JOINED or not numbers:
            return _Origin()
        return _Origin(module, parameter, int(numbers[-1]), converter.source_patterns.index(pattern))


def _joined_experts(outline: Any, split: NetworkSplit) -> dict[str, ExpertParts]:
    """Of the modules whose parameters transformers joins without changing them otherwise, still without layers."""
    found = find_experts(outline).items()
    return {name: ExpertParts(kind, split.experts.get(name)) for name, kind in found if kind.is_plain}


def _block(layer: str, share: Share, *, transposed: bool = False) -> Block:
    return Block(
        name=layer,
        num_outputs=share.num_outputs,
        num_inputs=share.num_inputs,
        outputs=share.outputs,
        inputs=share.inputs,
        transposed=transposed,
    )


def _tensors_of(checkpoint: Checkpoint, layer: str) -> set[str]:
    """All of a layer but its bias."""
    return {name for name in checkpoint.names if name.startswith(f"{layer}.") and name != f"{layer}.bias"}
