"""Cohere 2: Cohere with windows; layers without one do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families import cohere
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    return replace(cohere.describe(config), windowed_layers="layer_types", rotated_layers="windowed")
