"""What each layer reads of a token beside the residual stream: features of its own, of the token alone (Gemma 4).

    features of all layers = (norm(projection(embedding)) + table[token]) / sqrt(2)

The norm is of each layer's features by itself. A layer then adds output(f(gate(stream)) * its features) to the stream.
Every rank computes all of it, but for the table, which is split by vocabulary.

Legend: T tokens, D hidden size, L layers, F features of a layer, C = L * F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.norm import RMSNorm
from inflight.layers.part import Part
from inflight.layers.vocabulary import VocabularyParallelEmbedding
from inflight_kernels import Activation


@dataclass(slots=True, kw_only=True)
class LayerInputs:
    table: VocabularyParallelEmbedding
    """(V, C). It has no rows for embeddings that requests bring: they get that of the id in their place."""
    projection: Part[Tensor]
    """(T, D) to (T, C)."""
    norm: RMSNorm

    def __call__(self, token_ids_T: Tensor, embedded_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        """(T, C), of each layer's features one behind the other."""
        projected_TC = self.projection(embedded_TD, metadata)
        projected_TLF = projected_TC.view(projected_TC.shape[0], -1, len(self.norm.weight_D))
        normed_TC = self.norm(projected_TLF, metadata).view(projected_TC.shape)
        return (normed_TC + self.table(token_ids_T, metadata)) * 2**-0.5


@dataclass(slots=True, kw_only=True)
class LayerInputBranch:
    """How a layer takes its features in; see Part."""

    gate: Part[Any]
    """(T, D) to (T, F)."""
    activation: Activation
    columns: slice
    """Of C, the layer's own."""
    output: Part[Tensor]
    """(T, F) to (T, D)."""

    def __call__(self, stream_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert metadata.layer_inputs_TC is not None, "a layer without the features that it reads"
        gate_TF = inflight_kernels.activate(self.gate(stream_TD, metadata), self.activation)
        return self.output(gate_TF * metadata.layer_inputs_TC[:, self.columns], metadata)
