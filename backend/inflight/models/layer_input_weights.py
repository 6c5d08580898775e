"""Loads what layers read of each token beside the residual stream (LayerInputs). Every rank has it whole, but for the
table."""

from __future__ import annotations

from dataclasses import replace

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.decoder_layer import Branch
from inflight.layers.layer_inputs import LayerInputBranch, LayerInputs
from inflight.layers.norm import NoNorm, RMSNorm
from inflight.layers.part import Scaled
from inflight.models.branch_loading import norm_behind_part
from inflight.models.config import ModelConfig
from inflight.models.weights import Section, WeightLoader


def load_layer_inputs(config: ModelConfig, loader: WeightLoader) -> LayerInputs | None:
    """None = the network has none."""
    tensors, hidden_size = config.family.layer_inputs, config.hidden_size
    if tensors is None:
        return None
    num_features = config.num_layers * tensors.size
    table = loader.by_vocabulary(tensors.table, tensors.vocab_size, num_features)
    table.factor, table.gives_way = loader.rounded(tensors.size**0.5), False
    projection = loader.by_outputs(tensors.projection, "", (Section(num_features, 0, num_features),), hidden_size)
    return LayerInputs(
        table=table,
        projection=Scaled(projection, hidden_size**-0.5),
        norm=RMSNorm(loader.norm_weight(tensors.norm, "", tensors.size, config.family.norms), config.family.norms.eps),
    )


def load_layer_input_branch(config: ModelConfig, loader: WeightLoader, number: int) -> Branch:
    """How layer `number` takes its features in."""
    tensors, prefix = config.family.layer_inputs, f"{config.family.layers}.{number}."
    assert tensors is not None, "a network without inputs of layers"
    whole = Section(tensors.size, 0, tensors.size)
    gate = loader.by_outputs(tensors.gate, prefix, (whole,), config.hidden_size)
    output = loader.by_inputs(tensors.output, prefix, config.hidden_size, whole)
    part = LayerInputBranch(
        gate=gate,
        activation=tensors.activation,
        columns=slice(number * tensors.size, (number + 1) * tensors.size),
        # Each rank computes the same.
        output=replace(output, group=TensorParallelGroup()),
    )
    return Branch(norm=NoNorm(), part=part, norm_after=norm_behind_part(config, loader, tensors.norm_after, prefix))
