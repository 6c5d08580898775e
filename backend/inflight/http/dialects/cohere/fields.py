"""Bodies of POST /v2/embed."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inflight.http.api_error import invalid, unsupported
from inflight.http.dialects.body import MAX_PROMPTS

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
CALIBRATED = ("int8", "uint8")
NO_IMAGES = "this engine reads text"
FEATURES_OF_BYTE = 8
"""Features in a byte of `binary` and `ubinary`."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    content: list[Part]


class EmbedBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    input_type: str
    """See TextPrompts."""
    texts: list[str] | None = None
    inputs: list[Input] | None = None
    images: list[Any] | None = None
    embedding_types: list[EmbeddingType] | None = None
    """None = float."""
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """None = END."""
    max_tokens: int | None = None
    """Of each text, as far as the model takes them."""
    priority: int = 0


def texts_of(body: EmbedBody) -> list[str]:
    """Raises APIError, also for what this server does not do."""
    if body.images or body.input_type == "image":
        raise unsupported("images" if body.images else "input_type", NO_IMAGES)
    for name in CALIBRATED:
        if name in (body.embedding_types or ()):
            why = f"{name} needs ranges of each feature, which no checkpoint has: ask for float, binary or ubinary"
            raise unsupported("embedding_types", why)
    if body.priority:
        raise unsupported("priority", "vectors of texts are computed in the order in which they come")
    if body.truncate == "START":
        raise unsupported("truncate", "texts are cut at their end: END, or NONE for an error")
    if body.max_tokens is not None and body.truncate == "NONE":
        raise unsupported("max_tokens", "it says where texts are cut, and truncate is NONE")
    if body.max_tokens is not None and body.max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {body.max_tokens}", "max_tokens")
    if (body.texts is None) == (body.inputs is None):
        raise invalid("give the texts in one of texts and inputs", "texts")
    texts = body.texts if body.texts is not None else [_text_of(each) for each in body.inputs or ()]
    if not 0 < len(texts) <= MAX_PROMPTS:
        raise invalid(f"there must be 1 to {MAX_PROMPTS} texts, got {len(texts)}", "texts")
    if not all(texts):
        raise invalid("texts must not be empty: give at least one character", "texts")
    return texts


def _text_of(given: Input) -> str:
    for part in given.content:
        if part.type != "text" or part.text is None:
            raise unsupported("inputs", NO_IMAGES)
    return "\n".join(part.text or "" for part in given.content)
