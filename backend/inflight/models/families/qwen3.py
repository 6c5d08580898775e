"""Qwen3: a norm on each head of queries and keys; sliding windows on the layers that config.json names."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.families.qwen2 import windowed_layers
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    bias = config.flag("attention_bias")
    tensors = with_llamas_tensors(config, qkv_bias=bias, output_bias=bias, head_norms=True)
    return replace(tensors, windowed_layers=windowed_layers(config))
