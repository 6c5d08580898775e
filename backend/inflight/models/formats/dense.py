"""Weights that were not quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from inflight.layers.weight import DenseWeight
from inflight.models.checkpoint import FLOAT_DTYPES, Checkpoint
from inflight.models.formats.format import Block, Target, shape_of


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """`<name>.weight` (O, I), of any float type."""

    quantized: ClassVar[str] = ""

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> DenseWeight:
        """See WeightFormat."""
        return DenseWeight(read_values(checkpoint, blocks, target))


def read_values(
    checkpoint: Checkpoint,
    blocks: Sequence[Block],
    target: Target,
    dtype: torch.dtype | None = None,
    dtypes: tuple[str, ...] = FLOAT_DTYPES,
) -> Tensor:
    """The blocks' parts of their tensors `weight`, one below the other: (O, I) of `dtype`. `dtypes`: of the tensors."""
    for block in blocks:
        checkpoint.check(f"{block.name}.weight", block.shape, dtypes)
    values_OI = target.empty(*shape_of(blocks), dtype=dtype)
    copy_values(checkpoint, blocks, values_OI, dtypes)
    return values_OI


def copy_values(
    checkpoint: Checkpoint, blocks: Sequence[Block], values_OI: Tensor, dtypes: tuple[str, ...] = FLOAT_DTYPES
) -> None:
    """Copy the blocks' parts of their tensors `weight` into `values_OI`, one below the other."""
    parts = torch.split(values_OI, [len(block.outputs) for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        place = part.T if block.transposed else part
        checkpoint.copy_into(place, f"{block.name}.weight", block.shape, block.starts, dtypes)
