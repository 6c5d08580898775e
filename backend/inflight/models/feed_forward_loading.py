"""Loads one rank's part of a layer's feed-forward: an MLP, a mixture of experts, or both beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from inflight.layers.decoder_layer import Branch
from inflight.layers.mlp import MLP, GatedMLP
from inflight.layers.norm import NoNorm
from inflight.layers.part import Part
from inflight.models.branch_loading import fused, norm_behind_part, scaled
from inflight.models.config import ModelConfig
from inflight.models.expert_weights import load_mixture
from inflight.models.family import ExpertTensors, MLPTensors
from inflight.models.weights import WeightLoader


def load_feed_forward(config: ModelConfig, loader: WeightLoader, number: int, before: Sequence[Branch]) -> list[Branch]:
    """Of layer `number`. `before`: its other branches; in parallel to them it may have their norm."""
    experts, prefix = config.family.experts, f"{config.family.layers}.{number}."
    own = None if experts is None or number not in experts.layers else experts
    if own is None or own.beside is None:
        return [_load_one(config, loader, config.family.mlp, own, number, before)]
    mlp = replace(config.family.mlp, norm_after=own.beside.mlp_norm_after)
    chosen = Branch(
        norm=NoNorm(),
        part=load_mixture(loader, own, prefix, config.hidden_size, config.family.norms),
        norm_after=norm_behind_part(config, loader, own.beside.norm_after, prefix),
        is_beside=True,
        norm_of_sum=norm_behind_part(config, loader, config.family.mlp.norm_after, prefix),
    )
    return [_load_one(config, loader, mlp, None, number, before), chosen]


def _load_one(
    config: ModelConfig,
    loader: WeightLoader,
    mlp: MLPTensors,
    experts: ExpertTensors | None,
    number: int,
    before: Sequence[Branch],
) -> Branch:
    """`experts`: in the place of the MLP, whose norms they have."""
    family, prefix = config.family, f"{config.family.layers}.{number}."
    if experts is None:
        part = load_mlp(config, loader, mlp, number, prefix)
    else:
        part = load_mixture(loader, experts, prefix, config.hidden_size, family.norms)
    if family.is_parallel and mlp.norm is None:
        norm = before[0].norm
    else:
        norm, part = fused(family, loader.norm(mlp.norm, prefix, config.hidden_size, family.norms), part)
    return Branch(
        norm=norm,
        part=scaled(part, family.residual_multiplier * mlp.output_multiplier),
        norm_after=norm_behind_part(config, loader, mlp.norm_after, prefix),
        is_beside=family.is_parallel,
    )


def load_mlp(config: ModelConfig, loader: WeightLoader, mlp: MLPTensors, number: int, prefix: str) -> Part[Tensor]:
    """Of layer `number`, whose tensors begin with `prefix`."""
    if mlp.respelt is not None:
        mlp = _spelt_as_in(loader, prefix, mlp, *mlp.respelt)
    size = config.intermediate_size * (2 if number in mlp.double_layers else 1)
    intermediate = loader.even_section("intermediate_size", size)
    sections = (intermediate, intermediate) if mlp.is_gated else (intermediate,)
    wide = loader.by_outputs(mlp.gate_up, prefix, sections, config.hidden_size)
    down = loader.by_inputs(mlp.down, prefix, config.hidden_size, intermediate)
    if mlp.is_gated:
        return GatedMLP(wide, down, mlp.activation, mlp.gate_multiplier)
    return MLP(wide, down, mlp.activation)


def _spelt_as_in(loader: WeightLoader, prefix: str, mlp: MLPTensors, own: str, other: str) -> MLPTensors:
    """With the names that the checkpoint has; see `MLPTensors.respelt`."""
    down = replace(mlp.down, name=mlp.down.name.replace(own, other, 1))
    if f"{prefix}{down.name}.weight" not in loader.checkpoint:
        return mlp
    names = tuple(name.replace(own, other, 1) for name in mlp.gate_up.names)
    return replace(mlp, gate_up=replace(mlp.gate_up, names=names), down=down)
