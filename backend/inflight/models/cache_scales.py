"""The scales of an fp8 KV cache that a checkpoint brings: one for the keys and one for the values of each layer.

Whoever quantised the checkpoint chose them so that keys / k_scale and values / v_scale fit float8_e4m3fn's range of
+-448. Knows neither weights nor how they are split: every rank's heads have the scales of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import ConfigurationError
from inflight.models.checkpoint import Checkpoint

NAMES = (
    (".k_scale", ".v_scale"),
    (".attn.k_scale", ".attn.v_scale"),
    (".k_proj.k_scale", ".v_proj.v_scale"),
    (".qkv_proj.k_scale", ".qkv_proj.v_scale"),
    (".k_proj.output_scale", ".v_proj.output_scale"),
)
"""Of both tensors, behind that of the module that computes attention. In this order: of compressed-tensors, vLLM,
ModelOpt, ModelOpt if the products are stacked, and of compressed-tensors in older checkpoints."""


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Of one layer. Keys and values are stored divided by them."""

    k: float = 1.0
    v: float = 1.0


def read_cache_scales(checkpoint: Checkpoint, attention: str) -> CacheScales:
    """The scales of the layer whose module `attention` computes attention; 1 if the checkpoint brings none.

    They are tensors of one element. Raises ConfigurationError if one is missing or no scale, or if only other layers
    have some.
    """
    for k_name, v_name in NAMES:
        k_name, v_name = f"{attention}{k_name}", f"{attention}{v_name}"
        if k_name in checkpoint or v_name in checkpoint:
            return CacheScales(checkpoint.read_scale(k_name), checkpoint.read_scale(v_name))
    if has_cache_scales(checkpoint):
        raise ConfigurationError(
            f"{checkpoint.folder}: the checkpoint brings scales of the KV cache for other layers, but none for "
            f"{attention}"
        )
    return CacheScales()


def has_cache_scales(checkpoint: Checkpoint) -> bool:
    """Whether it brings some for any layer."""
    endings = tuple(name for pair in NAMES for name in pair)
    return any(name.endswith(endings) for name in checkpoint.names)
