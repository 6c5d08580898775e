"""EXAONE 4: norms behind the branches, a norm on each head; among layers with windows, those without do not rotate."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.llama import with_llamas_tensors, with_norms_behind
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    family = with_norms_behind(with_llamas_tensors(config, head_norms=True))
    if not config.values.get("sliding_window"):
        return family
    return replace(family, windowed_layers="layer_types", rotated_layers="windowed")
