"""Attention whose scores are made of what tokens are and of where they are: DeBERTa's (He et al. 2021,
https://arxiv.org/abs/2006.03654, section 3.1).

A score is the product of a query and a key, more one of the query and what stands for the distance as a key, and one of
the key and what stands for the distance as a query. Computed in torch, one text after the other.

Legend: T tokens, D hidden size, H heads of this rank, E head size, S places of distances, N tokens of a text, P most
tokens of a text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.layers.norm import LayerNorm
from inflight.layers.part import Part


@dataclass(slots=True, kw_only=True)
class DisentangledAttention:
    """See Part. The products of places need no other weights than those of tokens."""

    qkv: Part[Any]
    """(T, D) to (T, 3 * H * E): queries, keys, values."""
    output: Part[Tensor]
    """(T, H * E) to (T, D)."""
    num_heads: int
    head_dim: int
    places_SD: Tensor
    """What stands for each distance, those of keys behind the query first."""
    norm: LayerNorm | None
    """Of these."""
    buckets_P: Tensor
    """int64 (2P - 1,): by the distance of a query from its key, from 1 - P to P - 1, a number from -S / 2 on."""
    reads_keys: bool
    """Whether places are keys."""
    reads_queries: bool
    """Whether they are queries."""
    _of_places: tuple[Tensor, Tensor] | None = None
    """Queries and keys (H, S, E), float32, made with the first step."""

    def __call__(self, hidden_TD: Any, metadata: AttentionMetadata) -> Tensor:
        assert metadata.sequences is not None, "an encoder must know whose tokens a step has"
        q_HTE, k_HTE, v_HTE = self._by_heads(self.qkv(hidden_TD, metadata))
        if self._of_places is None:
            places_SD = self.places_SD if self.norm is None else self.norm.alone(self.places_SD)
            queries_HSE, keys_HSE, _ = self._by_heads(self.qkv(places_SD, metadata))
            self._of_places = queries_HSE, keys_HSE
        borders: list[int] = metadata.sequences.starts.tolist()
        texts = [slice(begin, end) for begin, end in pairwise(borders)]
        attended_HTE = torch.zeros_like(v_HTE)  # behind the last text there may be padding
        for text in texts:
            attended_HTE[:, text] = self._attend(q_HTE[:, text], k_HTE[:, text], v_HTE[:, text], *self._of_places)
        attended_THE = attended_HTE.transpose(0, 1).to(self.places_SD.dtype)
        return self.output(attended_THE.flatten(1), metadata)

    def _by_heads(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, 3 * H * E) to three times (H, T, E), float32."""
        parts = qkv_TC.float().view(len(qkv_TC), 3, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        return parts[0], parts[1], parts[2]

    def _attend(self, q_HNE: Tensor, k_HNE: Tensor, v_HNE: Tensor, queries_HSE: Tensor, keys_HSE: Tensor) -> Tensor:
        """(H, N, E)."""
        numbers_N = torch.arange(q_HNE.shape[1], device=q_HNE.device)
        middle, num_places = len(self.buckets_P) // 2, keys_HSE.shape[1]
        bucket_NN = self.buckets_P[numbers_N[:, None] - numbers_N[None, :] + middle]
        shape = (self.num_heads, *bucket_NN.shape)
        scores_HNN = q_HNE @ k_HNE.mT
        if self.reads_keys:
            place_NN = (num_places // 2 + bucket_NN).clamp(0, num_places - 1)
            scores_HNN += (q_HNE @ keys_HSE.mT).gather(2, place_NN.expand(shape))
        if self.reads_queries:
            place_NN = (num_places // 2 - bucket_NN).clamp(0, num_places - 1)
            scores_HNN += (k_HNE @ queries_HSE.mT).gather(2, place_NN.expand(shape)).mT
        num_products = 1 + self.reads_keys + self.reads_queries
        scale = 1.0 / math.sqrt(self.head_dim * num_products)
        return (scores_HNN * scale).softmax(-1) @ v_HNE
