"""GLM-4.7-Flash: DeepSeek-V3 with experts in the layers that config.json names."""

from __future__ import annotations

from inflight.models.config_file import ConfigValues
from inflight.models.families.deepseek_v3 import with_latents_and_experts
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    kinds = config.texts("mlp_layer_types")
    layers = frozenset(number for number, kind in enumerate(kinds) if kind == "sparse")
    return with_latents_and_experts(config, layers, adjacent_pairs=config.flag("rope_interleave"))
