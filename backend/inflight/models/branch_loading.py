"""What the loaders of all branches of a layer have in common: norms around a part, and constants that multiply it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inflight.layers.fp8 import fuse_quantization
from inflight.layers.norm import LayerNorm, NoNorm, Norm, RMSNorm
from inflight.layers.part import Part, Scaled
from inflight.models.config import ModelConfig
from inflight.models.family import Family
from inflight.models.split_tensors import NotSplit
from inflight.models.weights import WeightLoader


def norm_behind_part(
    config: ModelConfig, loader: WeightLoader, tensor: NotSplit | None, prefix: str
) -> Norm[Tensor] | None:
    """`prefix`: of the layer's tensors."""
    return None if tensor is None else loader.norm(tensor, prefix, config.hidden_size, config.family.norms)


def fused(family: Family, norm: RMSNorm | LayerNorm | NoNorm, part: Part[Tensor]) -> tuple[Norm[Any], Part[Any]]:
    """With tokens in fp8 between them, where an RMSNorm gives them to one part alone."""
    if family.is_parallel or not isinstance(norm, RMSNorm):
        return norm, part
    return fuse_quantization(norm, part)


def scaled(part: Part[Any], multiplier: float) -> Part[Any]:
    return part if multiplier == 1.0 else Scaled(part, multiplier)
