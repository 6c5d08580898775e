"""Gemma 3, its text: Gemma 2 with a norm on each head, and rotary parameters for each type of layers."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigValues
from inflight.models.families.gemma2 import with_gemmas_tensors
from inflight.models.family import Family


def describe(config: ConfigValues) -> Family:
    """See Family."""
    family = with_gemmas_tensors(config, head_norms=True)
    # Its scores have no cap, whatever attn_logit_softcapping says: as in transformers.
    return replace(family, attention=replace(family.attention, soft_cap=0.0))
