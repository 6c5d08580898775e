"""What a recording of a network consists of: operations, the columns of buffers that they read and write, constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight_kernels.cpu.collectives import RankPlace
from inflight_kernels.cpu.operations import Operation


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a buffer of the recording, from `start` on."""

    buffer: int
    start: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A contiguous tensor that does not depend on the batch. Equal to another one if both are the same memory."""

    tensor: Tensor = field(compare=False)
    address: int
    shape: torch.Size

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        return cls(tensor, tensor.data_ptr(), tensor.shape)


NOWHERE = Columns(-1, 0)
"""Of an operand that an operation does not have."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight or the bias of a linear layer. `gated`: gate above up, which are joined."""

    constant: Constant
    gated: bool = False


@dataclass(frozen=True, slots=True)
class CacheTensors:
    keys: Constant
    values: Constant


Field = Columns | Constant | Weight | CacheTensors | tuple[int, ...] | float | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation, with the fields of its structure, except for `kind` and those that follow from others."""

    kind: type[Operation]
    fields: Mapping[str, Field]
    writes: tuple[str, ...]
    """Names of the fields that it writes; of Columns, it reads the others."""

    def columns(self, written: bool) -> list[Columns]:
        """The columns that it writes, or reads."""
        return [
            value
            for name, value in self.fields.items()
            if isinstance(value, Columns) and value != NOWHERE and (name in self.writes) == written
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A network's operations in order, over buffers of a row for each token."""

    dtype: torch.dtype
    """Of all values, of the weights and of the cache."""
    operations: tuple[Recorded, ...]
    widths: tuple[int, ...]
    """Columns of each buffer, numbered in the order of their first use."""
    input: int | None
    """The buffer that holds the network's input; None if token ids are its input."""
    output: Columns
    output_size: int
    ranks: RankPlace | None
    """The ranks that compute it together; None = it does not exchange anything."""
