"""Embeddings that requests bring for some tokens of a step. Does not know requests.

Legend: T tokens of the step, G those of them with an embedding of their own, D features of an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenEmbeddings:
    """They replace what the embedding has looked up, before anything else is done with it."""

    places_G: Tensor
    """int64, indices among the T tokens, none twice."""
    rows_GD: Tensor
    """float32"""

    def put_into(self, hidden_TD: Tensor) -> Tensor:
        """Overwrite the rows of these tokens, in place."""
        return hidden_TD.index_copy_(0, self.places_G, self.rows_GD.to(hidden_TD.dtype))
