"""Why an `Ask` cannot be served, and for which of its fields: a dialect puts its own words for fields in the sentence.

The engine knows no fields of `Ask`. Its sentences begin with the name of what is wrong, in its own words, by which
`field_of` finds the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from inflight.errors import InvalidRequest
from inflight.sampling import Sampling

Words = Mapping[str, str]
"""Field of `Ask` -> what a dialect calls it; a field that is not there has the same name."""

SAME_NAMES = frozenset((*Sampling.__struct_fields__, "max_tokens", "bad_words", "priority", "allotted_time_ms"))
"""What the engine calls as `Ask` does."""
BEGINNINGS = {
    "the prompt ": "prompt",
    "token id ": "prompt",
    "the guide ": "guide",
    "the grammar ": "guide",
    "guided decoding ": "guide",
    "end_ids ": "stop_token_ids",
    "num_return_sequences ": "choices",
    "the LoRA adapter ": "adapter",
    "there is no LoRA adapter ": "adapter",
    "this engine serves no LoRA adapters": "adapter",
    "the request needs room ": "max_tokens",
    "the logits, log probabilities ": "log_probs",
}
"""How other sentences of the engine begin -> the field."""


class Kind(Enum):
    WRONG = auto()
    UNSUPPORTED = auto()
    """It is known, and not done here."""
    TOO_LONG = auto()
    """Prompt and output are longer than the context."""
    TOO_LARGE = auto()
    """It is too large to be looked at."""


class Refusal(InvalidRequest):
    def __init__(self, field: str, sentence: str, *others: str, kind: Kind = Kind.WRONG, **values: object) -> None:
        """`field`: of `Ask`, "" = none. `sentence`: with {0} in the place of the field's name, {1} and so on in that
        of `others`, and the names of `values` in theirs."""
        self.field, self.kind = field, kind
        self._sentence, self._others, self._values = sentence, others, values
        super().__init__(self.said({}))

    def said(self, words: Words) -> str:
        """The sentence in a dialect's words."""
        fields = (self.field, *self._others)
        return self._sentence.format(*(words.get(field, field) for field in fields), **self._values)


def unsupported(field: str, why: str) -> Refusal:
    """A field that is known, and not honoured."""
    return Refusal(field, "{0} is not supported: {why}", kind=Kind.UNSUPPORTED, why=why)


def about(field: str, error: InvalidRequest) -> Refusal:
    """An error that knows no field as a refusal of this one."""
    return Refusal(field, "{said}", said=error)


def context_too_long(limit: int, num_prompt: int, field: str = "prompt", num_new: int | None = None) -> Refusal:
    """In OpenAI's words, which frameworks search for."""
    asked = f"your messages resulted in {num_prompt} tokens"
    if num_new is not None:
        asked = f"you requested {num_prompt + num_new} tokens ({num_prompt} in the prompt, {num_new} in the completion)"
    sentence = (
        f"This model's maximum context length is {limit} tokens. However, {asked}. Please reduce the length of the "
        "prompt or of the completion."
    )
    return Refusal(field, sentence, kind=Kind.TOO_LONG)


def text_too_long(limit: int, num_tokens: int) -> Refusal:
    """Of a text that is only read, for a vector or a score."""
    return Refusal(
        "prompt",
        "This model's maximum context length is {limit} tokens. However, {0} has {count}. Please shorten it.",
        kind=Kind.TOO_LONG,
        limit=limit,
        count=num_tokens,
    )


def field_of(sentence: str) -> str:
    """The field that an error of the engine is about; "" if that is none, or not known."""
    for begin, field in BEGINNINGS.items():
        if sentence.startswith(begin):
            return field
    first = sentence.partition(" ")[0]
    return first if first in SAME_NAMES else ""
