"""OLMo 3: OLMo 2 with sliding windows, and rotary parameters for each type of layers."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import olmo2
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return replace(olmo2.describe(config), windowed_layers="layer_types")
