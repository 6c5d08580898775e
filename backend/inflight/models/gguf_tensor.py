"""A tensor of a GGUF file as the checkpoint of transformers has it: slices of its floats, or of its codes and scales.

Rows of queries and keys that llama.cpp keeps in another order are put back into that of transformers. A row is a whole
number of blocks, so that quantised rows move as they are. Of norms that llama.cpp keeps plus 1, the 1 is taken off.
Knows no names.

Legend: O rows (output features), I columns (input features), G groups of columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.gguf.file import GgufFile
from inflight.gguf.tensor_types import BF16, F16, F32, TensorType
from inflight.gguf.tensors import NamedTensor
from inflight.models.formats.coded import Coding
from inflight.models.ggml_codes import Bytes, decode
from inflight_kernels.matmul.coded_weight import join_halves

FLOATS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


class GgufTensor:
    """What safetensors calls a slice, and more: it reads its bytes when it is indexed."""

    def __init__(self, file: GgufFile, tensor: NamedTensor) -> None:
        self.type: TensorType = tensor.info.type
        self._shape = tensor.shape
        self._num_heads = tensor.num_heads
        self._adds_one = tensor.adds_one
        # A vector of floats has a row for each.
        num_columns = 1 if len(self._shape) == 1 and self.type in FLOATS else self._shape[-1]
        self._row_bytes = self.type.row_bytes(num_columns)
        rows = np.frombuffer(file.bytes_of(tensor.info), np.uint8).reshape(-1, self._row_bytes)
        if tensor.expert is not None:
            by_part = rows.reshape(tensor.info.shape[0], tensor.num_parts, -1, self._row_bytes)
            rows = by_part[tensor.expert, tensor.part]
        self._rows: Bytes = rows

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        """Of the floats that indexing gives, as safetensors names it."""
        return self.type.name if self.type in FLOATS else F32.name

    def __getitem__(self, index: Any) -> Tensor:
        """Its floats. `index`: a slice, or a tuple of them, one for each dimension; an ellipsis for all."""
        slices = () if index is ... else index if isinstance(index, tuple) else (index,)
        if len(self._shape) == 1:
            return self._values(self._take(slice(None))).flatten()[slices]
        rows, *columns = slices or (slice(None),)
        inner: tuple[Any, ...] = (slice(None), *columns)
        return self._values(self._take(rows)).view(-1, *self._shape[1:])[inner]

    def codes(self, rows: range, columns: range, coding: Coding) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of a matrix whose type has this coding, maybe in common with others: codes as a CodedWeight has them, scales
        (O, G), and zeros (O, G), if there are to be any. `columns`: whole groups."""
        groups = slice(columns.start // coding.group_size, columns.stop // coding.group_size)
        taken = self._take(slice(rows.start, rows.stop))
        decoded = decode(taken.reshape(-1, self.type.block_bytes), self.type, coding)

        def of_rows(values: NDArray[Any], part: slice) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values.reshape(len(rows), -1)[:, part]))

        codes = of_rows(decoded.codes, slice(columns.start, columns.stop))
        scales = of_rows(decoded.scales, groups).to(coding.scale_dtype)
        zeros = None if decoded.zeros is None else of_rows(decoded.zeros, groups)
        return codes if coding.code.bits == 8 else join_halves(codes), scales, zeros

    def _take(self, rows: slice) -> Bytes:
        """The bytes of these rows, in the order of transformers."""
        if not self._num_heads:
            return self._rows[rows]
        # The file has the first row of a head's first half, the first of its second half, the second of the first, ...
        places = np.arange(len(self._rows)).reshape(self._num_heads, -1, 2).swapaxes(1, 2).flatten()
        taken: Bytes = self._rows[places[rows]]
        return taken

    def _values(self, rows: Bytes) -> Tensor:
        """(O, I)."""
        dtype = FLOATS.get(self.type)
        if dtype is None:
            values = torch.from_numpy(_dequantize(np.ascontiguousarray(rows), self.type))
        else:
            # A copy: torch wants memory that can be written to.
            values = torch.from_numpy(rows.copy()).view(dtype)
        return values - 1 if self._adds_one else values


def _dequantize(rows: Bytes, kind: TensorType) -> NDArray[np.float32]:
    import gguf  # takes a while to import

    with np.errstate(all="ignore"):  # whoever takes the numbers looks at them
        found: NDArray[np.float32] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.name])
    return found
