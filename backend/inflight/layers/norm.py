"""Normalisation as an object that holds its weight. Does not know where in the network it is used.

Legend: T tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata

Normed = TypeVar("Normed", covariant=True)
"""(T, D), as the part behind takes it: a tensor, or in fp8 (fp8.py)."""


class Norm(Protocol[Normed]):
    """Normalises hidden states (T, D), alone, after adding the residual, or after looking them up."""

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata, /) -> Normed: ...

    def of_embeddings(self, token_ids_T: Tensor, table_VD: Tensor, /) -> tuple[Normed, Tensor]:
        """(normalised rows, rows) of an embedding's table."""
        ...

    def add(self, hidden_TD: Tensor, residual_TD: Tensor, metadata: AttentionMetadata, /) -> tuple[Normed, Tensor]:
        """(normalised sum, sum) of hidden states and residual."""
        ...


@dataclass(slots=True)
class LayerNorm:
    """See Norm."""

    weight_D: Tensor
    bias_D: Tensor | None
    eps: float

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.alone(hidden_TD)

    def of_embeddings(self, token_ids_T: Tensor, table_VD: Tensor) -> tuple[Tensor, Tensor]:
        """See Norm."""
        rows_TD = inflight_kernels.embedding(token_ids_T, table_VD)
        return self.alone(rows_TD), rows_TD

    def add(self, hidden_TD: Tensor, residual_TD: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """See Norm."""
        normed = inflight_kernels.layer_norm(hidden_TD, self.weight_D, self.bias_D, self.eps, residual_TD)
        assert isinstance(normed, tuple)
        return normed

    def alone(self, hidden_TD: Tensor) -> Tensor:
        """Where there is no step that rows are of."""
        normed = inflight_kernels.layer_norm(hidden_TD, self.weight_D, self.bias_D, self.eps)
        assert isinstance(normed, Tensor)
        return normed


@dataclass(slots=True)
class RMSNorm:
    """See Norm."""

    weight_D: Tensor
    """Of the type of hidden states, or float32; see inflight_kernels.rms_norm."""
    eps: float

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        normed = inflight_kernels.rms_norm(hidden_TD, self.weight_D, self.eps)
        assert isinstance(normed, Tensor)
        return normed

    def of_embeddings(self, token_ids_T: Tensor, table_VD: Tensor) -> tuple[Tensor, Tensor]:
        """See Norm."""
        return inflight_kernels.embedding_rms_norm(token_ids_T, table_VD, self.weight_D, self.eps)

    def add(self, hidden_TD: Tensor, residual_TD: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """See Norm."""
        normed = inflight_kernels.rms_norm(hidden_TD, self.weight_D, self.eps, residual_TD)
        assert isinstance(normed, tuple)
        return normed


@dataclass(slots=True)
class NoNorm:
    """Leaves hidden states as they are: of a branch that reads the residual stream itself."""

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        return hidden_TD

    def of_embeddings(self, token_ids_T: Tensor, table_VD: Tensor) -> tuple[Tensor, Tensor]:
        """See Norm."""
        rows_TD = inflight_kernels.embedding(token_ids_T, table_VD)
        return rows_TD, rows_TD

    def add(self, hidden_TD: Tensor, residual_TD: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """See Norm."""
        sum_TD = hidden_TD + residual_TD
        return sum_TD, sum_TD


@dataclass(slots=True)
class StreamNorm:
    """Another norm whose result is the residual stream from there on: of networks that normalise sums."""

    norm: Norm[Tensor]

    def __call__(self, hidden_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.norm(hidden_TD, metadata)

    def of_embeddings(self, token_ids_T: Tensor, table_VD: Tensor) -> tuple[Tensor, Tensor]:
        """See Norm."""
        normed_TD, _ = self.norm.of_embeddings(token_ids_T, table_VD)
        return normed_TD, normed_TD

    def add(self, hidden_TD: Tensor, residual_TD: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """See Norm."""
        normed_TD, _ = self.norm.add(hidden_TD, residual_TD, metadata)
        return normed_TD, normed_TD
