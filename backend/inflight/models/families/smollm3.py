"""SmolLM3: Llama in which some layers, every fourth as published, do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import llama
from inflight.models.families.qwen2 import windowed_layers
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    # 1 stands for a layer that has them, in spite of the name.
    rotated = frozenset(layer for layer, has in enumerate(config.whole_list("no_rope_layers")) if has)
    return replace(llama.describe(config), rotated_layers=rotated, windowed_layers=windowed_layers(config))
