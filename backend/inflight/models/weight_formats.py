"""How a checkpoint stores the weight of a matrix product, and how a rank reads its part of it.

Knows neither layers' names nor how they split. Legend: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from inflight.layers.weight import DenseWeight, Weight
from inflight.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The rows and columns of one weight (O, I) in the checkpoint that a rank reads."""

    name: str
    """Of the layer: the names of its tensors without their ending."""
    num_outputs: int
    num_inputs: int
    """Both of the whole weight."""
    outputs: range
    inputs: range


class WeightFormat(Protocol):
    """The format of the weights of all layers of a checkpoint."""

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device) -> Weight:
        """One weight with the outputs of all `blocks`, which have the same number of inputs.

        `dtype` is that of the activations. Raises ConfigurationError if the checkpoint does not hold the tensors, or if
        the format cannot be divided at the blocks' borders.
        """
        ...


class DenseFormat:
    """`<name>.weight` (O, I), of any float type."""

    def read(
        self, checkpoint: Checkpoint, blocks: Sequence[Block], dtype: torch.dtype, device: torch.device
    ) -> DenseWeight:
        """See WeightFormat."""
        for block in blocks:
            checkpoint.check(f"{block.name}.weight", (block.num_outputs, block.num_inputs))
        shape = (sum(len(block.outputs) for block in blocks), len(blocks[0].inputs))
        values_OI = torch.empty(shape, dtype=dtype, device=device)
        row = 0
        for block in blocks:
            checkpoint.copy_into(
                values_OI[row : row + len(block.outputs)],
                f"{block.name}.weight",
                (block.num_outputs, block.num_inputs),
                (block.outputs.start, block.inputs.start),
            )
            row += len(block.outputs)
        return DenseWeight(values_OI)
