"""What a layer keeps from step to step, as data: whoever allocates, copies, moves or shares it knows no more than this.

A unit of state stands for a block of tokens, as keys and values do, or for a whole sequence, as the state of a
recurrence does. The blocks of a sequence are in its block table; its own unit is the slot with the number of its row.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import inflight_kernels

CONVOLUTION = "convolution"
"""Name of the last inputs of a short convolution, in the state of whatever part has one."""

CHUNK = "chunk"
"""Name of the inputs of a recurrence's incomplete chunk, likewise."""

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape and dtype."""


class Unit(enum.Enum):
    BLOCK = "block"
    SEQUENCE = "sequence"


class LayerState(dict[str, Tensor]):
    """The tensors of a StateSpec by their names. Their first dimension are units: (blocks, tokens of a block, *shape),
    or (slots, *shape)."""

    def __init__(self, tensors: Mapping[str, Tensor], group: int = 0) -> None:
        """`group`: of a state of blocks, which of a step's block tables says where they are, see AttentionMetadata."""
        super().__init__(tensors)
        self.group = group


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    """Of what each token has of it, or each sequence."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    unit: Unit
    tensors: tuple[TensorSpec, ...]
    window: int = 0
    """Last tokens whose part of it is read, the token that reads included; 0 = all."""
    scales: tuple[float, ...] = ()
    """What stored numbers have to be multiplied by: ranks that hand over units must have the same."""
    shared_back: int = 0
    """How many places before it the state stands that is this one too, among those of a network's parts; 0 = it is a
    state of its own."""

    @property
    def num_bytes(self) -> int:
        """Of what each token has, or each sequence."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def allocate(self, num_units: int, block_size: int, zeros: Zeros) -> LayerState:
        """`block_size`: tokens of a block."""
        units = (num_units, block_size) if self.unit is Unit.BLOCK else (num_units,)
        return LayerState({tensor.name: zeros((*units, *tensor.shape), tensor.dtype) for tensor in self.tensors})


def last_inputs(conv_weight_CW: Tensor, dtype: torch.dtype) -> TensorSpec:
    """What a short convolution with this weight keeps of a sequence; `dtype`: of its inputs."""
    channels, width = conv_weight_CW.shape
    return TensorSpec(CONVOLUTION, (width - 1, channels), dtype)


def chunk_inputs(on: Tensor, num_heads: int, num_inputs: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """What a recurrence with so many inputs of each token for each head keeps of them, on the device of `on`: nothing
    where it computes token by token. `dtype`: of the inputs."""
    shape = inflight_kernels.chunk_shape(on, num_heads, num_inputs)
    return () if shape is None else (TensorSpec(CHUNK, shape, dtype),)
