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
        checkpoint.check(f"{block.name}.weight", (block.num_outputs, block.num_inputs), dtypes)
    values_OI = target.empty(*shape_of(blocks), dtype=dtype)
    parts = torch.split(values_OI, [len(block.outputs) for block in blocks])
    for block, part in zip(blocks, parts, strict=True):
        shape, starts = (block.num_outputs, block.num_inputs), (block.outputs.start, block.inputs.start)
        checkpoint.copy_into(part, f"{block.name}.weight", shape, starts, dtypes)
    return values_OI
