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
