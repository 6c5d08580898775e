"""A tensor of a GGUF file as the checkpoint of transformers has it: slices of its floats, or of its codes and scales.

Rows and columns that llama.cpp keeps in another order are put back into that of transformers. A row is a whole number
of blocks, so that quantised rows move as they are; columns move in codes, if whole groups do. Knows no names.

Legend: O rows (output features), I columns (input features), G groups of columns.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.gguf.file import GgufFile
from inflight.gguf.tensor_types import BF16, F16, F32, TensorType
from inflight.gguf.tensors import Change, JoinedTensors, NamedTensor
from inflight.models.formats.coded import Coding
from inflight.models.ggml_codes import GROUP_SIZE, Bytes, decode
from inflight_kernels.matmul.coded_weight import join_halves

FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}

Codes = tuple[Tensor, Tensor, Tensor | None]
"""As a CodedWeight has them, (O, I) or two in a byte; scales (O, G), and zeros (O, G), if there are to be any."""


class GgufTensor:
    """What safetensors calls a slice, and more: it reads its bytes when it is indexed."""

    def __init__(self, file: GgufFile, tensor: NamedTensor) -> None:
        self._tensor = tensor
        self._type: TensorType = tensor.info.type
        self._shape = tensor.shape
        shape = tensor.info.shape if tensor.is_turned else tensor.shape
        self._num_columns = math.prod(shape[1:]) if self._type in FLOATS and not tensor.is_turned else shape[-1]
        row_bytes = self._type.row_bytes(self._num_columns)
        rows = np.frombuffer(file.bytes_of(tensor.info), np.uint8)
        if tensor.expert is not None:
            rows = rows.reshape(tensor.info.shape[0], -1)[tensor.expert]
        self._rows: Bytes = rows.reshape(-1, row_bytes)
        self._places = None if tensor.order is None else tensor.order.places()
        size = len(self._rows) // tensor.num_parts
        own = slice(tensor.part * size, (tensor.part + tensor.span) * size)
        if self._places is None:
            self._rows = self._rows[own]
        else:
            self._places = self._places[own]

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Of its rows; F32 if they cannot be codes."""
        columns = self._tensor.column_order
        is_cut = self._tensor.is_turned or (columns is not None and columns.unit % GROUP_SIZE)
        return (F32 if is_cut and self._type not in FLOATS else self._type,)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        """Of the floats that indexing gives, as safetensors names it."""
        return self._type.name if self._type in FLOATS else F32.name

    def __getitem__(self, index: Any) -> Tensor:
        """Its floats. `index`: a slice, or a tuple of them, one for each dimension; an ellipsis for all."""
        slices = () if index is ... else index if isinstance(index, tuple) else (index,)
        if len(self._shape) == 1:
            return self._values(self._take(slice(None))).flatten()[slices]
        rows, *columns = slices or (slice(None),)
        inner: tuple[Any, ...] = (slice(None), *columns)
        if self._tensor.is_turned:
            return self._turned()[rows][inner]
        return self._values(self._take(rows)).view(-1, *self._shape[1:])[inner]

    def codes(self, rows: range, columns: range, coding: Coding) -> Codes:
        """Of a matrix whose types have this coding, maybe in common with others. `columns`: whole groups."""
        taken = self._take(slice(rows.start, rows.stop))
        decoded = decode(taken.reshape(-1, self._type.block_bytes), self._type, coding)
        order = self._tensor.column_order
        places = np.arange(self._num_columns) if order is None else order.places()

        def of_rows(values: NDArray[Any], width: int) -> Tensor:
            """`width`: columns that have a value in common."""
            taken = places[columns.start : columns.stop : width] // width
            of_all = values.reshape(len(rows), -1)
            part = of_all[:, taken] if order is not None else of_all[:, taken[0] : taken[-1] + 1]
            return torch.from_numpy(np.ascontiguousarray(part))

        codes = of_rows(decoded.codes, 1)
        scales = of_rows(decoded.scales, coding.group_size).to(coding.scale_dtype)
        zeros = None if decoded.zeros is None else of_rows(decoded.zeros, coding.group_size)
        return codes if coding.code.bits == 8 else join_halves(codes), scales, zeros

    def _take(self, rows: slice) -> Bytes:
        """The bytes of these rows, in the order of transformers."""
        taken: Bytes = self._rows[rows if self._places is None else self._places[rows]]
        return taken

    def _turned(self) -> Tensor:
        """(O, I) of all matrices, whose columns the file has as rows."""
        num_rows, num_columns = self._tensor.info.shape[-2:]
        return self._values(self._rows).view(-1, num_rows, num_columns).mT.reshape(-1, num_rows)

    def _values(self, rows: Bytes) -> Tensor:
        """(O, I)."""
        dtype = FLOATS.get(self._type)
        if dtype is None:
            values = torch.from_numpy(_dequantize(np.ascontiguousarray(rows), self._type))
        else:
            # A copy: torch wants memory that can be written to.
            values = torch.from_numpy(rows.copy()).view(dtype)
        if self._tensor.column_order is not None:
            values = values[:, self._tensor.column_order.places()]
        if self._tensor.change is Change.NEGATIVE_EXPONENTIAL:
            return (-values).log()
        return values - 1 if self._tensor.change is Change.PLUS_ONE else values


class JoinedTensor:
    """The same of several tensors whose rows are one's."""

    def __init__(self, file: GgufFile, joined: JoinedTensors) -> None:
        self._tensors = [GgufTensor(file, tensor) for tensor in joined.tensors]
        self._num_turns = joined.num_turns
        self._shape = joined.shape

    @property
    def types(self) -> tuple[TensorType, ...]:
        """See GgufTensor."""
        kinds = tuple(kind for tensor in self._tensors for kind in tensor.types)
        return kinds if self._num_turns == 1 else (F32,)

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        """See GgufTensor."""
        found = {tensor.get_dtype() for tensor in self._tensors}
        return found.pop() if len(found) == 1 else F32.name

    def __getitem__(self, index: Any) -> Tensor:
        """See GgufTensor."""
        dtype = torch.float32 if self.get_dtype() == F32.name else None
        parts = [tensor[...].to(dtype).view(self._num_turns, -1, *self._shape[1:]) for tensor in self._tensors]
        return torch.cat(parts, 1).view(self._shape)[index]

    def codes(self, rows: range, columns: range, coding: Coding) -> Codes:
        """See GgufTensor."""
        found, first = [], 0
        for tensor in self._tensors:
            num_rows = tensor.get_shape()[0]
            own = range(max(rows.start - first, 0), min(rows.stop - first, num_rows))
            if own:
                found.append(tensor.codes(own, columns, coding))
            first += num_rows
        codes, scales, zeros = zip(*found, strict=True)
        present = [each for each in zeros if each is not None]
        return torch.cat(codes), torch.cat(scales), torch.cat(present) if present else None


AnyTensor = GgufTensor | JoinedTensor


def open_tensor(file: GgufFile, tensor: NamedTensor | JoinedTensors) -> AnyTensor:
    return JoinedTensor(file, tensor) if isinstance(tensor, JoinedTensors) else GgufTensor(file, tensor)


def _dequantize(rows: Bytes, kind: TensorType) -> NDArray[np.float32]:
    import gguf  # takes a while to import

    with np.errstate(all="ignore"):  # whoever takes the numbers looks at them
        found: NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name])
    return found
