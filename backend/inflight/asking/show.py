"""What an answer tells besides its text."""

from __future__ import annotations

import msgspec

from inflight.output_config import OutputConfig


class Show(msgspec.Struct, frozen=True, kw_only=True):
    output: OutputConfig = OutputConfig()
    """What the engine returns of tokens: log probabilities, logits, hidden states."""
    prompt: bool = False
    """Whether the prompt's text stands before the answer."""
    token_ids: bool = False
    special_tokens: bool = False
    """Whether they have text."""
    reasoning: bool = True
    """Whether what the model thinks before it answers is shown, where it can be told apart."""


def output_config(log_probs: int | None, *, of_prompt: bool = False) -> OutputConfig:
    """`log_probs`: how many of the likeliest tokens have some beside each; None = none has. `of_prompt`: whether the
    prompt's tokens have some, too."""
    if log_probs is None:
        return OutputConfig()
    return OutputConfig(return_log_probs=True, num_log_probs=log_probs, return_prompt_log_probs=of_prompt)
