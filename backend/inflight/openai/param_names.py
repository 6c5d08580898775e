"""Which field of a body an error of the engine is about. The engine knows no bodies: its sentences begin with the name
of what is wrong, in its own words."""

from __future__ import annotations

from typing import NamedTuple

from inflight.openai.fields import ChatBody, CompletionBody

FIELDS = frozenset((*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__))
OF_PROMPT = ("the prompt ", "token id ")
OF_GUIDE = ("the guide ", "the grammar ", "guided decoding ")
OF_FIELDS = {
    "embedding_bias ": "allowed_token_ids",
    "end_ids ": "stop_token_ids",
    "num_return_sequences ": "n",
    "the LoRA adapter ": "model",
    "there is no LoRA adapter ": "model",
    "this engine serves no LoRA adapters": "model",
    "the request needs room ": "max_tokens",
    "the logits, log probabilities ": "logprobs",
}
"""How a sentence begins -> the field."""


class ParamNames(NamedTuple):
    """Of one request."""

    prompt: str
    """The field that its prompt stands in."""
    guide: str = ""
    """The one that asks for its grammar; "" = none does."""

    def of(self, sentence: str) -> str | None:
        """The field that the engine's error is about; None if that is none, or not known."""
        if sentence.startswith(OF_PROMPT):
            return self.prompt
        if sentence.startswith(OF_GUIDE):
            return self.guide or None
        for begin, field in OF_FIELDS.items():
            if sentence.startswith(begin):
                return field
        first = sentence.partition(" ")[0]
        return first if first in FIELDS else None


IN_PROMPT = ParamNames("prompt")
