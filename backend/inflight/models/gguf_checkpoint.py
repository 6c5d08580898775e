"""Reads the tensors of a GGUF file, or of several parts: those of the checkpoint of transformers, by their names there.

Floats are read as from other checkpoints; codes also as they are.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from inflight.checkpoint_files import GGUF
from inflight.errors import ConfigurationError
from inflight.gguf.file import GgufFile
from inflight.gguf.parts import linked_files
from inflight.gguf.tensors import JoinedTensors, NamedTensor, named_tensors
from inflight.models.checkpoint import FLOAT_DTYPES, Checkpoint
from inflight.models.formats.coded import Coding
from inflight.models.gguf_tensor import FLOATS, AnyTensor, open_tensor
from inflight.models.usable_values import why_unusable
from inflight_kernels.matmul.coded_weight import CodedWeight

logger = logging.getLogger(__name__)

DENSE_BYTES = 2**26
"""Of floats that are made at once of quantised weights, beside the tensor that they are copied to."""


class GgufCheckpoint(Checkpoint):
    def __init__(self, folder: str | Path, *, is_read: bool = True) -> None:
        """See Checkpoint. `folder`: made by inflight.gguf."""
        self._file = GgufFile(*linked_files(Path(folder)))
        self._tensors = named_tensors(self._file)
        self._made_dense: set[str] = set()
        """Names of types."""
        super().__init__(folder, is_read=is_read)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if kind is None and self._made_dense and self.is_read:
            logger.info(
                "layers of type %s were made dense as they were read, and take as much memory as unquantised ones",
                ", ".join(sorted(self._made_dense)),
            )

    def copy_into(
        self,
        target: Tensor,
        name: str,
        shape: tuple[int, ...],
        starts: tuple[int, ...] = (0,),
        dtypes: tuple[str, ...] = FLOAT_DTYPES,
        added: float = 0.0,
        times: float = 1.0,
    ) -> None:
        """See Checkpoint. Numbers are made of quantised weights a few rows at a time."""
        num_rows = max(DENSE_BYTES // (4 * max(target[:1].numel(), 1)), 1)
        if len(shape) == 1 or len(target) <= num_rows:
            super().copy_into(target, name, shape, starts, dtypes, added, times)
            return
        for first in range(0, len(target), num_rows):
            part = target[first : first + num_rows]
            super().copy_into(part, name, shape, (starts[0] + first, *starts[1:]), dtypes, added, times)

    def matrix(self, name: str, shape: tuple[int, int]) -> AnyTensor:
        """Tensor `name`, which must have this shape, whatever its type."""
        found: AnyTensor = self._slice(name, shape, FLOAT_DTYPES)
        return found

    def copy_codes(self, target: CodedWeight, coding: Coding, name: str, rows: range, columns: range) -> None:
        """Copy these rows and columns of the matrix `name`, whose type can have this coding. Into tensors on meta
        nothing is read."""
        if target.codes.is_meta or not self.is_read:
            return
        codes, scales, zeros = self._tensor(name).codes(rows, columns, coding)
        for shared in (scales, *([] if zeros is None else [zeros])):
            if reason := why_unusable(shared, shared.dtype):
                path = self.folder / self._file_of[name]
                raise ConfigurationError(f"{path}: tensor {name} has a scale that {reason}")
        target.codes.copy_(codes)
        target.scales.copy_(scales)
        if target.zeros is not None and zeros is not None:
            target.zeros.copy_(zeros)
        self._note(codes.nbytes + scales.nbytes)

    def note_dense(self, name: str) -> None:
        """The quantised matrix `name` of a product is kept as floats, which the log tells in the end."""
        self._made_dense |= {kind.name for kind in self._tensor(name).types if kind not in FLOATS}

    def _tensor(self, name: str) -> AnyTensor:
        found: AnyTensor = self._open(self._file_of[name]).get_slice(name)
        return found

    def _locate(self) -> dict[str, str]:
        return {name: tensor.info.path.name for name, tensor in self._tensors.items()}

    def _open(self, file_name: str) -> Any:
        return _Handle(self._file, self._tensors)


class _Handle:
    """What safetensors calls an open file."""

    def __init__(self, file: GgufFile, tensors: dict[str, NamedTensor | JoinedTensors]) -> None:
        self._file = file
        self._tensors = tensors

    def get_slice(self, name: str) -> AnyTensor:
        return open_tensor(self._file, self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[...]


def open_checkpoint(folder: str | Path, *, is_read: bool = True) -> Checkpoint:
    """The checkpoint in `folder`, safetensors or a GGUF file. Raises ConfigurationError."""
    kind = GgufCheckpoint if Path(folder, GGUF).exists() else Checkpoint
    return kind(folder, is_read=is_read)
