"""What an encoder's first layer reads: the embedding of a token, of its position and of the text that it is part of.

Legend: T tokens, D hidden size, S positions, Y types of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import inflight_kernels
from inflight.layers.attention import AttentionMetadata
from inflight.layers.norm import Norm
from inflight.layers.part import Part


@dataclass(slots=True, kw_only=True)
class EncoderEmbedding:
    """See Part."""

    tokens: Part[Any]
    """Token ids (T,) to (T, D)."""
    positions_SD: Tensor | None
    types_YD: Tensor | None
    """Of the first text, and the second one of a pair."""
    norm: Norm[Tensor]

    def __call__(self, token_ids_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        hidden_TD = self.tokens(token_ids_T, metadata)
        if self.types_YD is not None:
            types_T = metadata.token_types_T
            if types_T is None:
                types_T = torch.zeros_like(metadata.positions_T)
            hidden_TD = hidden_TD + inflight_kernels.embedding(types_T, self.types_YD)
        if self.positions_SD is not None:
            hidden_TD = hidden_TD + inflight_kernels.embedding(metadata.positions_T, self.positions_SD)
        return self.norm(hidden_TD, metadata)
