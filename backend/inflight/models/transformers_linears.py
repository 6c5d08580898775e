"""Replaces the linear layers of a network of transformers in place by this engine's products (ReplacedLinear), whose
weights C++ packs where it multiplies them. Knows no architecture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
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
from inflight.models.replaced_linear import ReplacedLinear
from inflight.models.transformers_plan import Share
from inflight_kernels import cpu
from inflight_kernels.cpu import STEP, Program, Recording, Unsupported, WeightPacker, Workspace

logger = logging.getLogger(__name__)

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


def replace_linears(
    network: Any, dtype: torch.dtype, device: torch.device, shares: Mapping[str, Share]
) -> dict[str, ReplacedLinear]:
    """Put ReplacedLinears in the place of the loaded layers of floats of `dtype`; all of a network by their names.
    `shares`: see NetworkSplit."""
    for name, module in linear_layers(network, with_tied=True).items():
        values = module.weight.data
        if values.dtype == dtype:
            replaced = replace_linear(network, name, module, dtype, device, shares.get(name))
            replaced.put(DenseWeight(values.T.contiguous() if isinstance(module, Conv1D) else values.contiguous()))
    replaced_layers = {name: module for name, module in network.named_modules() if isinstance(module, ReplacedLinear)}
    assert replaced_layers.keys() >= shares.keys(), "a layer that is split and has another type"
    return replaced_layers


def place_adapters(network: Any, layers: Mapping[str, ReplacedLinear], num_tokens: int, places: AdapterPlaces) -> None:
    """Note which layers take low-rank adapters: those that were called with all `num_tokens` tokens of a step, in their
    order. Neither heads do, nor experts, which have tokens of their own."""
    head = network.get_output_embeddings()
    for name, layer in layers.items():
        if layer is head or layer.rows_seen != {num_tokens} or "experts" in name.split("."):
            continue
        layer.lora, share = LoraSlots(layer.in_features, (layer.out_features,)), layer.share
        place = AdapterPlace(
            num_inputs=share.num_inputs,
            num_outputs=share.num_outputs,
            inputs=share.inputs,
            outputs=(share.outputs,),
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


def kept_in_float32(network: Any) -> tuple[str, ...]:
    """Parts of the names of modules whose parameters are float32, whatever the network's are."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return tuple(part for name in names for part in getattr(network, name, ()) or ())


def linear_layers(network: Any, *, with_tied: bool = False) -> dict[str, Any]:
    """Those whose class is nn.Linear or Conv1D itself; `with_tied`: also those that share their weight."""
    tied = getattr(network, "all_tied_weights_keys", {})
    kept = kept_in_float32(network)
    return {
        name: module
        for name, module in network.named_modules()
        if type(module) in (nn.Linear, Conv1D)
        and (with_tied or not any(f"{name}.weight" in names for names in (tied, tied.values())))
        and not any(part in name for part in kept)
    }


def sizes_of(module: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def replace_linear(
    network: Any, name: str, module: Any, dtype: torch.dtype, device: torch.device, share: Share | None
) -> ReplacedLinear:
    """`share`: None = all of it."""
    share = share or Share.whole(*sizes_of(module))
    replaced = ReplacedLinear(share, module.bias, dtype, device, is_transposed=isinstance(module, Conv1D))
    network.set_submodule(name, replaced)
    return replaced
