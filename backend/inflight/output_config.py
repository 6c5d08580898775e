"""What a request wants to know besides its tokens: an immutable value."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_LOG_PROBS = 20
"""Of `OutputConfig.num_log_probs`."""

Pooling = Literal["mean", "weighted_mean", "cls", "last", "max"]
"""Weights of the second are the tokens' positions, counted from 1, as in SGPT (arXiv 2202.08904); cls is the first
token's, max the largest of each feature."""


SCORES = "scores"
"""Name of the output that a network's head for scores gives of a prompt, (1, labels)."""
Pooled = Literal["", "vectors", "scores"]
"""What an engine gives of a prompt in the place of tokens: nothing, vectors, or scores beside them."""


class AdditionalModelOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor inside the network that a request wants to see."""

    name: str
    """One of `RequestLimits.model_outputs`. SCORES is of the prompt as it is, whatever the next two say."""
    gather_context: bool = False
    """Of the prompt's tokens, too: as a tensor of its own, whose name is `name` behind context_."""
    pooling: Pooling | None = None
    """Of the prompt's tokens together, and of no others: one row, (1, features), whose name is `name` behind
    pooled_."""
    first: int = 0
    """With `pooling`: place of the first token that counts. Those before it are what a model wants before a text."""

    @property
    def is_of_prompt(self) -> bool:
        """Whether the prompt's tokens must be computed for it."""
        return self.gather_context or self.pooling is not None or self.name == SCORES


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank must report besides the tokens, all of it under the model's raw distribution: before biases,
    penalties, temperature and filters.

    All but the first come as `Result.tensors`, in float32 where not said otherwise. Of what is asked of the prompt, its
    own tokens are computed even where their keys and values are in the cache: such a request reuses no prefix.
    """

    return_log_probs: bool = False
    """Of each generated token, in `Result.log_probs`."""
    num_log_probs: int = 0
    """So many of the likeliest tokens at each generated one: top_token_ids (int32) and top_log_probs, (tokens, n),
    falling. With `return_prompt_log_probs` also prompt_top_token_ids and prompt_top_log_probs, (prompt - 1, n)."""
    return_prompt_log_probs: bool = False
    """prompt_log_probs, (prompt - 1,): of each prompt token but the first, given those before it."""
    return_context_logits: bool = False
    """context_logits, (prompt, vocabulary): behind each prompt token."""
    return_generation_logits: bool = False
    """generation_logits, (tokens, vocabulary): those that each generated token was chosen by."""
    additional_model_outputs: list[AdditionalModelOutput] = []
    """Tensors of the network by name, (tokens, features)."""
