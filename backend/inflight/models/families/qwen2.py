"""Qwen2: biases on queries, keys and values; sliding windows on the layers that config.json names."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family


def windowed_layers(config: ConfigValues) -> Literal["none", "layer_types"]:
    """Those with windows."""
    return "layer_types" if config.flag("use_sliding_window") else "none"


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return replace(with_llamas_tensors(config, qkv_bias=True), windowed_layers=windowed_layers(config))
