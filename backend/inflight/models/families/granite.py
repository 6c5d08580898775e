"""Granite 3: Llama with constant factors on embedding, attention scores, residual branches and logits."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import llama
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    family = llama.describe(config)
    return replace(
        family,
        attention=replace(family.attention, scale=config.scale("attention_multiplier")),
        embedding_multiplier=config.scale("embedding_multiplier"),
        residual_multiplier=config.scale("residual_multiplier"),
        logits_multiplier=1 / config.scale("logits_scaling"),
    )
