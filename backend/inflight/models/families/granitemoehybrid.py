"""Granite 4: layers of Mamba-2, some that attend, without positions by an option, and in each a shared feed-forward,
beside experts where there are any."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import granite, granitemoe
from inflight.models.families.mamba import LINEAR, mamba_of_layers
from inflight.models.family import Family, SharedExpertTensors
from inflight.models.split_tensors import SplitByInputs, SplitByOutputs

GATE_UP, DOWN = SplitByOutputs(("shared_mlp.input_linear",)), SplitByInputs("shared_mlp.output_linear")


def describe(config: ConfigValues) -> Family:
    """See Family."""
    has_experts, size = config.count("num_local_experts") > 0, config.whole("shared_intermediate_size")
    family = granitemoe.describe(config) if has_experts else granite.describe(config)
    kinds = config.texts("layer_types")
    return replace(
        family,
        mixers=(mamba_of_layers(config, frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)),),
        mlp=replace(family.mlp, gate_up=GATE_UP, down=DOWN, intermediate_size=size),
        experts=family.experts
        and replace(family.experts, shared=SharedExpertTensors(gate_up=GATE_UP, down=DOWN, intermediate_size=size)),
        rotated_layers="all" if config.values.get("position_embedding_type") == "rope" else frozenset(),
    )
