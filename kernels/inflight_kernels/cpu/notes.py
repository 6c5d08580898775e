"""What all recorders of operations have in common: the step that is recorded, its values, and the list of notes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight_kernels.cpu.batch import Batch
from inflight_kernels.cpu.collectives import RankPlace
from inflight_kernels.cpu.operations import Operation
from inflight_kernels.cpu.recorded_values import RecordedValues
from inflight_kernels.cpu.recording import Bias, Columns, Field, Recorded


class Notes:
    def __init__(self, x: Tensor, batch: Batch, dtype: torch.dtype) -> None:
        self._batch = batch
        self._dtype = dtype
        self._x = x
        self._num_tokens = batch.positions_T.shape[0]
        self._num_decodes = batch.decode_rows_N.shape[0]
        self._operations: list[Recorded] = []
        self._values = RecordedValues(self._num_tokens, dtype)
        self._ranks: RankPlace | None = None
        self._input = self._values.write(x).buffer if x.dim() == 2 else None

    def _result(self, size: int, width: int = 0, dtype: torch.dtype | None = None) -> tuple[Tensor, Columns]:
        """A new tensor that an operation writes, and where: in a buffer of its columns, or of `width`. `dtype`: as of
        RecordedValues.read."""
        out = self._values.empty(self._num_tokens, size, dtype=dtype)
        return out, self._values.write(out, width)

    def _bias(self, bias: Tensor | None, what: str, shape: Sequence[int], *, gated: bool = False) -> Bias | None:
        return None if bias is None else Bias(self._values.constant(bias, what, shape), gated)

    def _note(self, kind: type[Operation], writes: tuple[str, ...], **fields: Field) -> None:
        self._operations.append(Recorded(kind, fields, writes))
