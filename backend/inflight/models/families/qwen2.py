"""Qwen2: biases on queries, keys and values; sliding windows on the layers that config.json names."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return replace(with_llamas_tensors(qkv_bias=True), windowed_layers="layer_types")
