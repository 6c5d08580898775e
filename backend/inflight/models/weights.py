"""Loads one rank's weights: which slices of a checkpoint's tensors form a layer's weight. Knows no architecture.

Legend: I input features, O output features, D hidden size. The weights of layers with a common input are stacked while
they are read. All weights are copied: none is mapped from the files afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.rms_norm import RMSNorm
from inflight.layers.vocabulary import VocabularyParallelEmbedding
from inflight.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Columns:
    """A rank's consecutive output features of one tensor."""

    name: str
    num_features: int
    """Of the whole tensor."""
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Reads a checkpoint's tensors as the parts of a network, on this rank's device and in its dtype."""

    checkpoint: Checkpoint
    group: TensorParallelGroup
    dtype: torch.dtype
    device: torch.device

    def split(self, what: str, value: int) -> int:
        """This rank's share of `value`; ConfigurationError, naming `what`, if it does not split evenly."""
        if value % self.group.size:
            raise ConfigurationError(
                f"tensor_parallel_size {self.group.size} does not divide the checkpoint's {what} ({value})"
            )
        return value // self.group.size

    def columns(self, name: str, num_features: int) -> Columns:
        """This rank's even share of the output features of `name`."""
        size = self.split(f"{name} features", num_features)
        return Columns(name, num_features, self.group.rank * size, size)

    def stacked(self, parts: list[Columns], num_inputs: int, bias: bool) -> ColumnParallelLinear:
        """One layer with the output features of several tensors, concatenated."""
        for part in parts:
            self.checkpoint.check(f"{part.name}.weight", (part.num_features, num_inputs))
        total = sum(part.size for part in parts)
        weight_OI = self._empty(total, num_inputs)
        bias_O = self._empty(total) if bias else None
        row = 0
        for part in parts:
            rows = slice(row, row + part.size)
            shape = (part.num_features, num_inputs)
            self.checkpoint.copy_into(weight_OI[rows], f"{part.name}.weight", shape, start=part.start)
            if bias_O is not None:
                self.checkpoint.copy_into(bias_O[rows], f"{part.name}.bias", shape[:1], start=part.start)
            row += part.size
        return ColumnParallelLinear(weight_OI, bias_O)

    def rows(self, name: str, num_features: int, num_inputs: int, bias: bool) -> RowParallelLinear:
        """A layer with this rank's even share of the input features and all output features."""
        size = self.split(f"{name} inputs", num_inputs)
        shape = (num_features, num_inputs)
        self.checkpoint.check(f"{name}.weight", shape)
        weight_OI = self._empty(num_features, size)
        self.checkpoint.copy_into(weight_OI, f"{name}.weight", shape, dim=1, start=self.group.rank * size)
        bias_O = self.vector(f"{name}.bias", num_features) if bias else None
        return RowParallelLinear(weight_OI, bias_O if self.group.rank == 0 else None, self.group)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.vector(f"{name}.weight", size), eps)

    def vector(self, name: str, size: int) -> Tensor:
        """A one-dimensional tensor, whole."""
        self.checkpoint.check(name, (size,))
        values = self._empty(size)
        self.checkpoint.copy_into(values, name, (size,))
        return values

    def vocabulary(self, name: str, vocab_size: int, hidden_size: int) -> VocabularyParallelEmbedding:
        """This rank's rows of a table with one row per token; the last rank's are padded with zeros."""
        size = -(-vocab_size // self.group.size)
        shape = (vocab_size, hidden_size)
        self.checkpoint.check(f"{name}.weight", shape)
        weight_UD = self._empty(size, hidden_size).zero_()
        start = self.group.rank * size
        self.checkpoint.copy_into(weight_UD, f"{name}.weight", shape, start=start)
        return VocabularyParallelEmbedding(weight_UD, self.group)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
