"""What a recording of a network consists of: operations, the columns of buffers that they read and write, constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu.collectives import RankPlace
from inflight_kernels.cpu.operations import Operation
from inflight_kernels.matmul.coded_weight import Code, Inputs
from inflight_kernels.recurrent.gate import Gate


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
class Grouping:
    """What the codes of a weight are, and what groups of them share; see CodedWeight."""

    code: Code
    scales: Constant
    zeros: Constant | None
    group_size: int
    inputs: Inputs = Inputs.KEPT


@dataclass(frozen=True, slots=True)
class Weight:
    """The matrix of a linear layer, or those of experts, which have one more dimension."""

    values: Constant
    """Elements, or codes."""
    num_inputs: int
    """Columns that are multiplied: behind its own, zeros."""
    grouping: Grouping | None = None
    """Of codes."""
    gated: bool = False
    """Gate above up, which are joined."""

    @property
    def constants(self) -> tuple[Constant, ...]:
        if self.grouping is None:
            return (self.values,)
        zeros = self.grouping.zeros
        return (self.values, self.grouping.scales, *([] if zeros is None else [zeros]))


@dataclass(frozen=True, slots=True)
class Bias:
    """Of a linear layer, or those of experts, which have one more dimension. `gated`: as its weight."""

    constant: Constant
    gated: bool = False


@dataclass(frozen=True, slots=True)
class ByTap:
    """The weight of a short convolution (channels, taps), or its bias (channels,). C++ has it in float32, with the
    channels of a tap side by side."""

    constant: Constant


@dataclass(frozen=True, slots=True)
class NormWeight:
    """Of a norm. `is_wide`: float32, where elements are not."""

    constant: Constant
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class CacheTensors:
    keys: Constant
    values: Constant
    """That of the keys, if values are their first elements."""
    value_dim: int
    scales: tuple[float, float] = (1.0, 1.0)
    """Of keys and of values, see Cache."""
    slot_scales: tuple[Constant, Constant] | None = None
    """Those of each slot and head."""
    group: int = 0
    """Which of the step's blocks say where its tokens are."""


Field = (
    Columns
    | Constant
    | Weight
    | Bias
    | ByTap
    | NormWeight
    | CacheTensors
    | Activation
    | Gate
    | tuple[int, ...]
    | float
    | None
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation, with the fields of its structure, except for `kind` and those that follow from others."""

    kind: type[Operation]
    fields: Mapping[str, Field]
    writes: tuple[str, ...]
    """Names of the fields that it writes, over what was there or not; of Columns, it reads the others."""

    def value(self, name: str) -> Columns:
        """The field of that name, which is a value."""
        value = self.fields[name]
        assert isinstance(value, Columns)
        return value

    def weight(self, name: str) -> Weight:
        """The field of that name, which is a matrix."""
        weight = self.fields[name]
        assert isinstance(weight, Weight)
        return weight

    def number(self, name: str) -> int:
        """The field of that name, which counts something."""
        number = self.fields[name]
        assert isinstance(number, int)
        return number

    def columns(self, written: bool) -> list[Columns]:
        """The columns that it writes, or reads."""
        return [
            value
            for name, value in self.fields.items()
            if isinstance(value, Columns) and value != NOWHERE and (name in self.writes) == written
        ]

    def buffers(self, written: bool | None = None) -> set[int]:
        """The buffers that it writes to, or reads from; None = either."""
        if written is None:
            return self.buffers(written=True) | self.buffers(written=False)
        return {columns.buffer for columns in self.columns(written)}

    def changed(self, kind: type[Operation] | None = None, **fields: Field) -> Recorded:
        """Another operation in its place, with these fields instead of its own."""
        return replace(self, kind=kind or self.kind, fields={**self.fields, **fields})


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A network's operations in order, over buffers of a row for each token."""

    dtype: torch.dtype
    """Of all values and of plain weights; the cache may be fp8."""
    operations: tuple[Recorded, ...]
    widths: tuple[int, ...]
    """Columns of each buffer, numbered in the order of their first use."""
    input: int | None
    """The buffer that holds the network's input; None if token ids are its input."""
    output: Columns
    output_size: int
    ranks: RankPlace | None
    """The ranks that compute it together; None = it does not exchange anything."""

    @property
    def quantizes_inputs(self) -> bool:
        """Whether a product takes its inputs in whole numbers."""
        fields = (value for operation in self.operations for value in operation.fields.values())
        groupings = (value.grouping for value in fields if isinstance(value, Weight))
        return any(grouping is not None and grouping.inputs is Inputs.INT8 for grouping in groupings)

    @cached_property
    def uses(self) -> Mapping[int, tuple[int, ...]]:
        """Buffer -> the places in `operations` that read or write it, in order. The input is written before the first
        one, at -1, and the result is read behind the last one."""
        uses: dict[int, list[int]] = {buffer: [] for buffer in range(len(self.widths))}
        if self.input is not None:
            uses[self.input].append(-1)
        for place, operation in enumerate(self.operations):
            for buffer in operation.buffers():
                uses[buffer].append(place)
        uses[self.output.buffer].append(len(self.operations))
        return {buffer: tuple(places) for buffer, places in uses.items()}
