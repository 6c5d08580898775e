"""Replaces the linear layers of a network of transformers in place by this engine's products (ReplacedLinear).

Before a network is loaded: which of its layers are codes in the checkpoint, or become codes. They get no memory for
floats. Once it is loaded: the weights of all layers, and where C++ multiplies them, packed ones. Knows no architecture.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from inflight.layers.lora import LoraSlots
from inflight.layers.weight import DenseWeight
from inflight.models.adapter_places import (
    DOWN,
    GATE,
    GATE_UP,
    KEY,
    OUTPUT,
    QKV,
    QUERY,
    UP,
    VALUE,
    AdapterPlace,
    AdapterPlaces,
)
from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.coded import CodedFormat
from inflight.models.formats.format import Block, Target
from inflight.models.formats.on_load import HEAD_CODES, OnLoadFormat
from inflight.models.replaced_linear import ReplacedLinear
from inflight_kernels import Inputs, cpu
from inflight_kernels.cpu import STEP, Program, Recording, Unsupported, WeightPacker, Workspace

logger = logging.getLogger(__name__)

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of configurations. A layer with so many outputs is a router."""
MODULE_NUMBERS = {
    "qkv_proj": QKV,
    "q_proj": QUERY,
    "k_proj": KEY,
    "v_proj": VALUE,
    "o_proj": OUTPUT,
    "gate_proj": GATE,
    "up_proj": UP,
    "down_proj": DOWN,
    "gate_up_proj": GATE_UP,
}
"""TensorRT-LLM's, by the name that most classes have for a layer."""


@dataclass(frozen=True, slots=True)
class CodedLayer:
    """A linear layer of a network that is codes in the checkpoint, or is to become codes."""

    block: Block
    weight_format: CodedFormat
    is_head: bool


class CodedLayers:
    """Those of a network, by the names of its modules; and of the checkpoint's other layers of codes, their floats."""

    def __init__(self, network_class: Any, hf_config: Any, checkpoint: Checkpoint, weight_format: CodedFormat) -> None:
        self._checkpoint, self._weight_format = checkpoint, weight_format
        self._names: set[str] = set()
        """Tensors of the checkpoint that are not what a network's own loading code expects."""
        self._floats: dict[str, FloatsOfCodes] = {}
        self.of_modules: dict[str, CodedLayer] = {}
        with torch.device("meta"):
            outline = network_class(copy.deepcopy(hf_config))
        modules = _linear_layers(outline)
        head = outline.get_output_embeddings()
        is_made = isinstance(weight_format, OnLoadFormat)
        routers = {getattr(hf_config, key, None) for key in EXPERT_COUNTS}
        source = _Sources(outline)
        for layer in weight_format.layers(checkpoint):
            module_name = source.module_of(layer)
            module = modules.get(module_name)
            if module is None or (is_made and (_sizes(module)[1] in routers or _sizes(module)[0] % STEP)):
                if not is_made:
                    self._add_floats(layer, weight_format)
                continue
            num_inputs, num_outputs = _sizes(module)
            own_format: CodedFormat = weight_format
            if isinstance(weight_format, OnLoadFormat) and module is head:
                own_format = replace(weight_format, code=HEAD_CODES.get(weight_format.code, weight_format.code))
            block = Block(
                name=layer,
                num_outputs=num_outputs,
                num_inputs=num_inputs,
                outputs=range(num_outputs),
                inputs=range(num_inputs),
                transposed=is_made and isinstance(module, Conv1D),
            )
            self.of_modules[module_name] = CodedLayer(block, own_format, module is head)
            self._names |= _tensors_of(checkpoint, layer)

    def _add_floats(self, layer: str, weight_format: CodedFormat) -> None:
        num_outputs, num_inputs = weight_format.shape_of_layer(self._checkpoint, layer)
        block = Block(
            name=layer,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            outputs=range(num_outputs),
            inputs=range(num_inputs),
        )
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
        """`network_class` whose networks have ReplacedLinears without a weight in the place of these layers."""
        layers = self.of_modules

        def init(network: Any, *arguments: Any, **options: Any) -> None:
            network_class.__init__(network, *arguments, **options)
            for name in layers:
                _replace(network, name, network.get_submodule(name), dtype, device)

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
            own = replace(own, keeps_codes=target.keeps_codes and layer.block.num_inputs % STEP == 0)
            module.put(layer.weight_format.read(self._checkpoint, [layer.block], own))
        if isinstance(self._weight_format, OnLoadFormat) and self._weight_format.cache is not None:
            # Before the codes are packed, and given up.
            self._weight_format.cache.finish()


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


class _Sources:
    """Which module of a network a layer of the checkpoint is, as transformers' loading code renames it."""

    def __init__(self, outline: Any) -> None:
        mapping = get_model_conversion_mapping(outline)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._prefix, self._state = outline.base_model_prefix, outline.state_dict()

    def module_of(self, layer: str) -> str:
        """Its name; empty if its weight is computed of the checkpoint's, or if there is none."""
        key, converted = rename_source_key(
            f"{layer}.weight", self._renamings, self._converters, self._prefix, self._state
        )
        if converted is not None or key not in self._state:
            return ""
        return str(key).removesuffix(".weight")


def replace_linears(network: Any, dtype: torch.dtype, device: torch.device) -> dict[str, ReplacedLinear]:
    """Put ReplacedLinears in the place of the loaded layers of floats of `dtype`; all of a network by their names."""
    for name, module in _linear_layers(network, with_tied=True).items():
        values = module.weight.data
        if values.dtype == dtype:
            replaced = _replace(network, name, module, dtype, device)
            replaced.put(DenseWeight(values.T.contiguous() if isinstance(module, Conv1D) else values.contiguous()))
    return {name: module for name, module in network.named_modules() if isinstance(module, ReplacedLinear)}


def place_adapters(network: Any, layers: Mapping[str, ReplacedLinear], num_tokens: int, places: AdapterPlaces) -> None:
    """Note which layers take low-rank adapters: those that were called with all `num_tokens` tokens of a step, in their
    order. Neither heads do, nor experts, which have tokens of their own."""
    head = network.get_output_embeddings()
    for name, layer in layers.items():
        if layer is head or layer.rows_seen != {num_tokens} or "experts" in name.split("."):
            continue
        layer.lora = LoraSlots(layer.in_features, (layer.out_features,))
        place = AdapterPlace(
            num_inputs=layer.in_features,
            num_outputs=layer.out_features,
            inputs=range(layer.in_features),
            outputs=(range(layer.out_features),),
            slots=layer.lora,
            index=0,
        )
        places.add(name, place)
        numbers, ending = [part for part in name.split(".") if part.isdigit()], name.rpartition(".")[2]
        if len(numbers) == 1 and ending in MODULE_NUMBERS:
            places.numbered[MODULE_NUMBERS[ending], int(numbers[0])] = name


def settle(layers: Iterable[ReplacedLinear], dtype: torch.dtype, order: cpu.Order | None, shared: set[int]) -> None:
    """Let the layers compute: in C++ those that it multiplies, if there is an `order` of its sums. `shared`: addresses
    of floats that others read as well, and that must stay."""
    recordings: dict[ReplacedLinear, Recording] = {}
    if order is not None:
        recordings = {layer: found for layer in layers if (found := _record(layer, dtype, shared)) is not None}
    if recordings and order is not None:
        library, workspace = cpu.load_library(dtype, order=order), Workspace()
        packer = WeightPacker(library, recordings.values())
        for layer, recording in recordings.items():
            layer.settle(Program(library, recording, packer, workspace))
        logger.info("%d linear layers run in C++, %s", len(recordings), library.instructions)
    for layer in layers:
        if layer not in recordings:
            layer.settle()


def _record(layer: ReplacedLinear, dtype: torch.dtype, shared: set[int]) -> Recording | None:
    """None for a layer that torch has to compute."""
    weight = layer.stored
    if layer.in_features % STEP or layer.is_read:
        return None
    if isinstance(weight, DenseWeight) and weight.values_OI.data_ptr() in shared:
        weight = DenseWeight(weight.values_OI.clone())
    # Packed ones are copies, and what was copied is freed.
    bias_O = None if layer.bias is None else layer.bias.data.clone()
    try:
        return cpu.record(lambda x_TI, _: weight.multiply(x_TI, bias_O), layer.in_features, dtype)
    except Unsupported as reason:
        logger.info("torch computes a linear layer: %s", reason)
        return None


def _linear_layers(network: Any, *, with_tied: bool = False) -> dict[str, Any]:
    """Those whose class is nn.Linear or Conv1D itself; `with_tied`: also those that share their weight."""
    tied = getattr(network, "all_tied_weights_keys", {})
    kept = tuple(getattr(network, "_keep_in_fp32_modules", ()) or ()) + tuple(
        getattr(network, "_keep_in_fp32_modules_strict", ()) or ()
    )
    return {
        name: module
        for name, module in network.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and (with_tied or not any(f"{name}.weight" in names for names in (tied, tied.values())))
        and not any(part in name for part in kept)
    }


def _sizes(module: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def _replace(network: Any, name: str, module: Any, dtype: torch.dtype, device: torch.device) -> ReplacedLinear:
    replaced = ReplacedLinear(*_sizes(module), module.bias, dtype, device, is_transposed=isinstance(module, Conv1D))
    network.set_submodule(name, replaced)
    return replaced


def _tensors_of(checkpoint: Checkpoint, layer: str) -> set[str]:
    """All of a layer but its bias."""
    return {name for name in checkpoint.names if name.startswith(f"{layer}.") and name != f"{layer}.bias"}
