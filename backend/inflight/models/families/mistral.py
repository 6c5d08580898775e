"""Mistral: Llama without biases; with a sliding window, it applies to all layers."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return replace(with_llamas_tensors(config), windowed_layers="all")
