"""What all formats of weights have in common: the blocks that a rank reads, and what it makes of them.

Knows neither layers' names nor how they split. Legend: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.layers.weight import Weight
from inflight.models.checkpoint import Checkpoint
from inflight_kernels import Code, Inputs


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
    transposed: bool = False
    """Whether floats of the checkpoint are (I, O)."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of a weight of floats in the checkpoint."""
        shape = self.num_outputs, self.num_inputs
        return shape[::-1] if self.transposed else shape

    @property
    def starts(self) -> tuple[int, int]:
        """Where in it the block begins."""
        starts = self.outputs.start, self.inputs.start
        return starts[::-1] if self.transposed else starts


class Allocate(Protocol):
    """Makes a tensor of a weight, where the network's weights lie; its values are undefined."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """`dtype`: None = that of the activations."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a rank makes of the weights that it reads."""

    dtype: torch.dtype
    """Of the activations."""
    device: torch.device
    empty: Allocate
    """Makes the tensors that a weight keeps."""
    keeps_codes: bool = False
    """Quantised weights stay codes, which C++ multiplies. Otherwise they become what the device can multiply: on a CPU
    floats."""
    inputs: Inputs | None = None
    """What C++ multiplies codes with; None = as the checkpoint says."""

    def inputs_of(self, code: Code, told: Inputs = Inputs.KEPT) -> Inputs:
        """Of products with such codes. `told`: by the checkpoint."""
        return (self.inputs or told) if code.is_whole else Inputs.KEPT


class WeightFormat(Protocol):
    """The format of the weights of all layers of a checkpoint."""

    @property
    def quantized(self) -> str:
        """What the pages call quantised weights of the checkpoint; empty if all are floats."""

    def read(self, checkpoint: Checkpoint, blocks: Sequence[Block], target: Target) -> Weight:
        """One weight with the outputs of all `blocks`, which have the same number of inputs.

        Raises ConfigurationError if the checkpoint does not hold the tensors, if the format cannot be divided at the
        borders of the blocks, or if the device cannot multiply it.
        """
        ...


def shape_of(blocks: Sequence[Block]) -> tuple[int, int]:
    """(O, I) of the weight of all blocks."""
    return sum(len(block.outputs) for block in blocks), len(blocks[0].inputs)
