"""Embedding and head, split by vocabulary over the ranks: token ids to hidden states, hidden states to logits.

Legend: T tokens, B rows that sample, D hidden size, U this rank's part of the vocabulary, V the vocabulary.
Every rank holds ceil(V / ranks) rows; the last rank's are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.layers.attention import AttentionMetadata
from inflight.layers.weight import Weight
from inflight_kernels import CodedWeight


@dataclass(slots=True)
class VocabularyParallelEmbedding:
    """Each rank looks up the token ids of its part, zeros for all others; the results are summed over the ranks."""

    weight_UD: Tensor | CodedWeight
    group: TensorParallelGroup
    dtype: torch.dtype
    """Of the hidden states."""
    factor: float = 1.0
    """Of the rows that are looked up; embeddings that requests bring have it already."""
    gives_way: bool = True
    """Whether such embeddings stand in the place of its rows."""

    def __call__(self, token_ids_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        first = None if self.group.size == 1 else self.group.rank * self.weight_UD.shape[0]
        rows_TD = inflight_kernels.embedding(
            token_ids_T, self.weight_UD, first, self.factor, self.gives_way, self.dtype
        )
        hidden_TD = self.group.all_reduce(rows_TD)
        if metadata.given is None or not self.gives_way:
            return hidden_TD
        return metadata.given.put_into(hidden_TD)

    def table(self, metadata: AttentionMetadata) -> Tensor | None:
        """(V, D), if a call returns rows of it as they are; None = it has codes, sums over ranks or puts given
        embeddings in."""
        if isinstance(self.weight_UD, CodedWeight):
            return None
        is_as_it_is = self.group.size == 1 and metadata.given is None and self.factor == 1.0
        return self.weight_UD if is_as_it_is else None


@dataclass(slots=True)
class PositionedEmbedding:
    """Embeddings of tokens and of their positions, added."""

    tokens: Callable[[Tensor, AttentionMetadata], Tensor]
    positions_SD: Tensor

    def __call__(self, token_ids_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        hidden_TD = self.tokens(token_ids_T, metadata)
        return hidden_TD + inflight_kernels.embedding(metadata.positions_T, self.positions_SD)


@dataclass(slots=True)
class VocabularyParallelHead:
    """Logits of the whole vocabulary, equal on every rank.

    It takes no metadata: what it is called with are the rows that sample and not the tokens of the step.
    """

    weight: Weight
    """(U, D)."""
    vocab_size: int
    group: TensorParallelGroup
    deterministic: bool = False
    """The bits of a row of logits depend on its hidden state alone."""
    bias_U: Tensor | None = None
    """Of this rank's tokens."""

    def __call__(self, hidden_BD: Tensor) -> Tensor:
        logits_BV = self.group.all_gather(self.weight.multiply(hidden_BD, self.bias_U, self.deterministic))
        return logits_BV[:, : self.vocab_size]
