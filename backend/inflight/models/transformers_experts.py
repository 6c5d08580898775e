"""Replaces the experts of a network of transformers in place by this engine's (ReplacedExperts), where they compute the
same: transformers' `use_experts_implementation` says what a module of experts is called with and how its parameters
are laid out, and a trial, by the module's own code with a few small parameters, what it computes of them.

Knows no architecture. Legend: D what an expert reads and writes, E experts, I intermediate size of an expert, C = 2 I,
or I without gates.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.models.formats.format import Target
from inflight.models.formats.on_load import OnLoadFormat, quantize_into
from inflight.models.replaced_experts import ReplacedExperts, StoredExperts
from inflight.models.transformers_linears import kept_in_float32
from inflight.models.transformers_plan import ExpertShare, expert_counts
from inflight_kernels import Activation, CodedWeight, cpu
from inflight_kernels.cpu import STEP, Choices, Program, Recording, Unsupported, WeightPacker, Workspace
from inflight_kernels.moe import ExpertWeights

logger = logging.getLogger(__name__)

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What transformers' decorator notes of a module."""
TRIED_SCALES = (0.2, 1.0, 4.0, 16.0)
"""Of the inputs of a trial: gates and ups on both sides of where activations bend or are clamped."""
TRIED_TOLERANCE = 1e-5
"""Of the error of a row, relative to its norm, in float32. The two kinds of GELU differ by ten times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKind:
    """What the experts of a module compute, and how their parameters are laid out."""

    num_experts: int
    size: int
    """D"""
    inner_size: int
    """I"""
    is_gated: bool
    has_biases: bool
    is_transposed: bool
    """Whether weights are (E, inputs, outputs)."""
    in_turn: bool
    """Whether outputs of gate and up take turns; else all of gate come before all of up."""
    activation: Activation

    @property
    def first(self) -> str:
        """Name of the parameter with gate and up."""
        return "gate_up_proj" if self.is_gated else "up_proj"

    @property
    def num_first(self) -> int:
        """Products before the activation: gate and up, or up."""
        return 2 if self.is_gated else 1

    @property
    def is_plain(self) -> bool:
        """Whether the parameters are nothing but an expert's (outputs, inputs) one after the other."""
        return not (self.has_biases or self.is_transposed or self.in_turn)

    def stored(self, parameters: Mapping[str, Tensor]) -> StoredExperts:
        """The `parameters` of a module by name, as this engine has them."""
        first, down = parameters[self.first], parameters["down_proj"]
        if self.is_transposed:
            first, down = first.transpose(1, 2), down.transpose(1, 2)
        return StoredExperts(
            gate_up_ECD=self._in_halves(first).contiguous(),
            down_EDI=down.contiguous(),
            gate_up_bias_EC=self._in_halves(parameters[f"{self.first}_bias"]) if self.has_biases else None,
            down_bias_ED=parameters["down_proj_bias"] if self.has_biases else None,
            activation=self.activation,
        )

    def _in_halves(self, outputs: Tensor) -> Tensor:
        """(E, C, …) with all of gate before all of up."""
        return torch.cat([outputs[:, 0::2], outputs[:, 1::2]], 1) if self.in_turn else outputs


def find_experts(network: Any) -> dict[str, ExpertKind]:
    """Modules of experts that this engine computes, by name."""
    kept = kept_in_float32(network)
    kinds = {
        name: kind_of(module)
        for name, module in network.named_modules()
        if all(hasattr(module, flag) for flag in FLAGS) and not any(part in name for part in kept)
    }
    return {name: kind for name, kind in kinds.items() if kind is not None}


def kind_of(module: Any) -> ExpertKind | None:
    """None if the module computes anything else than `fused_moe` with one of its activations."""
    first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    down = getattr(module, "down_proj", None)
    if not (isinstance(first, Tensor) and isinstance(down, Tensor) and first.dim() == down.dim() == 3):
        return None
    num_experts, size, inner_size = down.shape
    if module.is_transposed:
        size, inner_size = inner_size, size
    for activation in Activation:
        kind = ExpertKind(
            num_experts=num_experts,
            size=size,
            inner_size=inner_size,
            is_gated=module.has_gate,
            has_biases=module.has_bias,
            is_transposed=module.is_transposed,
            in_turn=module.has_gate and not module.is_concatenated,
            activation=activation,
        )
        if _computes(module, kind):
            return kind
    return None


@torch.inference_mode()
def _computes(module: Any, kind: ExpertKind) -> bool:
    """Whether the module's own code gives what `kind` says, of few small experts."""
    num_experts, size, inner_size = 3, 8, 16
    num_first = kind.num_first * inner_size
    random = torch.Generator().manual_seed(0)
    shapes = {kind.first: (num_experts, num_first, size), "down_proj": (num_experts, size, inner_size)}
    parameters = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    if kind.is_transposed:
        parameters = {name: values.transpose(1, 2).contiguous() for name, values in parameters.items()}
    if kind.has_biases:
        parameters[f"{kind.first}_bias"] = torch.randn(num_experts, num_first, generator=random)
        parameters["down_proj_bias"] = torch.randn(num_experts, size, generator=random)
    twin = copy.copy(module)
    twin._parameters = parameters
    twin.num_experts, twin.config = num_experts, copy.copy(module.config)
    twin.config._experts_implementation = "eager"
    rows_TD = torch.cat([scale * torch.randn(8, size, generator=random) for scale in TRIED_SCALES])
    experts_TK = torch.stack([torch.randperm(num_experts, generator=random)[:2] for _ in rows_TD])
    weights_TK = torch.rand(experts_TK.shape, generator=random)
    try:
        found_TD = type(module).forward(twin, rows_TD, experts_TK, weights_TK)
        own_TD = kind.stored(parameters).compute(rows_TD, Choices(weights_TK, experts_TK.int()))
    except Exception as error:  # whatever the class raises
        logger.info("%s is not tried: %s", type(module).__name__, error)
        return False
    errors_T = (found_TD - own_TD).norm(dim=1) / own_TD.norm(dim=1)
    return bool((errors_T < TRIED_TOLERANCE).all())


def replace_experts(
    network: Any,
    dtype: torch.dtype,
    weight_format: OnLoadFormat | None,
    target: Target,
    shares: Mapping[str, ExpertShare],
) -> list[ReplacedExperts]:
    """Put ReplacedExperts in the place of the loaded ones of floats of `dtype`; all of a network. `weight_format`: what
    they become; None = they stay floats. `shares`: see NetworkSplit."""
    for name, kind in find_experts(network).items():
        module = network.get_submodule(name)
        if module.down_proj.dtype != dtype:
            continue
        share = shares.get(name)
        experts = replace_with(network, name, kind, dtype, share)
        parameters = {parameter: values.data for parameter, values in module.named_parameters(recurse=False)}
        stored = kind.stored(parameters)
        if weight_format is not None and kind.size % STEP == 0:
            part, first = ("", 0) if share is None else (share.part, share.experts.start)
            stored = _quantized(stored, f"{name}{part}", first, kind, weight_format, target)
        experts.put(stored)
    others = _other_experts(network)
    if others:
        names = ", ".join(sorted(set(others)))
        logger.warning("%d modules of experts are computed by transformers' code: %s", len(others), names)
    return [module for module in network.modules() if isinstance(module, ReplacedExperts)]


def replace_with(
    network: Any, name: str, kind: ExpertKind, dtype: torch.dtype, share: ExpertShare | None
) -> ReplacedExperts:
    """Experts without weights, in the place of the module of that name. `share`: None = all of them."""
    group, first = (TensorParallelGroup(), 0) if share is None else (share.group, share.experts.start)
    experts = ReplacedExperts(kind.size, dtype, group, first)
    network.set_submodule(name, experts)
    return experts


def _quantized(
    stored: StoredExperts, name: str, first: int, kind: ExpertKind, weight_format: OnLoadFormat, target: Target
) -> StoredExperts:
    """`first`: number of the first of these experts."""

    def codes(values_EOI: ExpertWeights, parameter: str) -> CodedWeight:
        assert isinstance(values_EOI, Tensor)
        num_outputs, num_inputs = values_EOI.shape[1:]
        weight = weight_format.allocate(weight_format.code, values_EOI.shape, target)
        for place, values_OI in enumerate(values_EOI):
            own = weight.of_expert(place)
            weight_format.keep(
                own,
                f"{name}.{first + place}.{parameter}",
                range(num_outputs),
                range(num_inputs),
                partial(quantize_into, own, values_OI),
            )
        return weight

    return StoredExperts(
        gate_up_ECD=codes(stored.gate_up_ECD, kind.first),
        down_EDI=codes(stored.down_EDI, "down_proj"),
        gate_up_bias_EC=stored.gate_up_bias_EC,
        down_bias_ED=stored.down_bias_ED,
        activation=stored.activation,
    )


def _other_experts(network: Any) -> list[str]:
    """Classes of modules of experts that are not replaced, one for each module."""
    counts, found = expert_counts(network.config.get_text_config(decoder=True)), dict[str, str]()
    for name, module in network.named_modules():
        is_stacked = any(each.dim() == 3 and each.shape[0] in counts for each in module.parameters(recurse=False))
        is_experts = name.rpartition(".")[2] == "experts" or is_stacked
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if is_experts and not is_inside and not isinstance(module, ReplacedExperts):
            found[name] = type(module).__name__
    return list(found.values())


def settle_experts(experts: Iterable[ReplacedExperts], dtype: torch.dtype, order: cpu.Order | None) -> None:
    """Let them compute: in C++ those that it multiplies, if there is an `order` of its sums."""
    experts = list(experts)
    recordings: dict[ReplacedExperts, Recording] = {}
    if order is not None:
        recordings = {each: found for each in experts if (found := _record(each, dtype)) is not None}
    if recordings and order is not None:
        library, workspace = cpu.load_library(dtype, order=order), Workspace()
        packer = WeightPacker(library, recordings.values())
        for each, recording in recordings.items():
            each.settle(Program(library, recording, packer, workspace))
        logger.info("the experts of %d layers run in C++, %s", len(recordings), library.instructions)
    for each in experts:
        if each not in recordings:
            each.settle()


def _record(experts: ReplacedExperts, dtype: torch.dtype) -> Recording | None:
    """None for experts that torch has to compute."""
    stored = experts.stored

    def network(x_TD: Tensor, batch: cpu.Batch) -> Tensor:
        assert batch.choices is not None, "a recording of chosen experts"
        return stored.compute(x_TD, batch.choices)

    if not experts.num_chosen:
        return None
    try:
        return cpu.record(network, experts.size, dtype, num_chosen=experts.num_chosen)
    except Unsupported as reason:
        logger.info("torch computes experts: %s", reason)
        return None
