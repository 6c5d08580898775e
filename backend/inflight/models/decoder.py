"""The native decoder: embedding, layers, norm and head of one rank. An encoder is one whose layers keep no state.

A pipeline stage has some of the layers: the first one the embedding too, the last one the norm and the head.

Legend: T tokens, B rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.layers.decoder_layer import DecoderLayer
from inflight.layers.layer_inputs import LayerInputs
from inflight.layers.norm import Norm, StreamNorm
from inflight.layers.part import Part
from inflight.layers.state import LayerState, StateSpec
from inflight.layers.vocabulary import VocabularyParallelEmbedding


@dataclass(slots=True, kw_only=True)
class Decoder:
    embedding: Part[Tensor] | None
    """None = an earlier stage has it: the input is the residual stream (T, D) instead of token ids."""
    layer_inputs: LayerInputs | None = None
    """What layers read beside the residual stream; None = nothing."""
    layers: Sequence[DecoderLayer]
    norm: Norm[Any]
    """Behind the last layer. A stage that has no head ends with the first norm of the next one's layers, of which only
    the sum counts: the residual stream."""
    head: Callable[[Tensor], Tensor] | None
    """None = a later stage has it, or it gives hidden states alone."""
    is_last: bool = True
    """Whether no later stage has layers."""
    first_layer: int = 0
    """Number of the first of `layers` in the whole network."""
    hidden_size: int
    dtype: torch.dtype
    """Of the activations."""

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """See Network."""
        return tuple(spec for layer in self.layers for spec in layer.state_specs)

    @property
    def input_size(self) -> int | None:
        """D, if its input is the residual stream; None = token ids."""
        return None if self.embedding is not None else self.hidden_size

    def forward(self, x_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata) -> Tensor:
        """Hidden states (T, D) after the last norm, or the residual stream; see Network."""
        return self.forward_layers(x_T, states, metadata, frozenset())[0]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def forward_layers(
        self, x_T: Tensor, states: Sequence[LayerState], metadata: AttentionMetadata, wanted: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See LayeredNetwork."""
        norms = [*(layer.norm for layer in self.layers), self.norm]
        normed_TD, stream_TD = self._begin(x_T, norms[0], metadata)
        if self.layer_inputs is not None:
            metadata = replace(metadata, layer_inputs_TC=self.layer_inputs(x_T, stream_TD, metadata))
        outputs: dict[int, Tensor] = {}
        of_parts = iter(states)
        for number, layer in enumerate(self.layers):
            output_TD, residual_TD = layer(normed_TD, stream_TD, of_parts, metadata)
            if residual_TD is None:
                normed_TD, stream_TD = norms[number + 1](output_TD, metadata), output_TD
            else:
                normed_TD, stream_TD = norms[number + 1].add(output_TD, residual_TD, metadata)
            if self.first_layer + number in wanted:
                outputs[self.first_layer + number] = stream_TD
        return normed_TD if self.is_last else stream_TD, outputs

    def by_layer(self) -> list[Decoder]:
        """The same network as stages of one layer each, whose results are their layers' outputs; and what is behind the
        last one, its norm, if this one is the last. None where layers read more than the residual stream, or where a
        norm ends one layer and begins the next one."""
        if self.layer_inputs is not None or isinstance(self.norm, StreamNorm):
            return []
        stages = []
        for number, layer in enumerate(self.layers):
            norm = self.layers[number + 1].norm if number + 1 < len(self.layers) else self.norm
            embedding = None if number else self.embedding
            first_layer = self.first_layer + number
            stages.append(
                replace(
                    self,
                    embedding=embedding,
                    layers=[layer],
                    norm=norm,
                    head=None,
                    is_last=False,
                    first_layer=first_layer,
                )
            )
        return [*stages, replace(self, embedding=None, layers=[])] if self.is_last else stages

    def _begin(self, x_T: Tensor, norm: Norm[Any], metadata: AttentionMetadata) -> tuple[Any, Tensor]:
        """The residual stream, normalised and as it is."""
        if isinstance(self.embedding, VocabularyParallelEmbedding):
            table_VD = self.embedding.table(metadata)
            if table_VD is not None:
                return norm.of_embeddings(x_T, table_VD)
        stream_TD = x_T if self.embedding is None else self.embedding(x_T, metadata)
        return norm(stream_TD, metadata), stream_TD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """(B, V) of the tokens that sample, or (B, labels) of a network that scores texts; equal on every rank."""
        assert self.head is not None, "logits of a stage that is not the last"
        return self.head(hidden_BD)
