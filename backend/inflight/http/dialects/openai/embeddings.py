"""Bodies of POST /v1/embeddings, and its answers."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from inflight.asking.ask import Prompt
from inflight.asking.vectors import Row
from inflight.http.api_error import invalid
from inflight.http.dialects.openai.prompts import split_prompts

ENCODINGS = ("float", "base64")


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    prompt_name: str | None = None
    """Of what the checkpoint has to stand before texts."""
    input_type: str | None = None
    """Chooses that by what the texts are."""


def prompts_of(body: EmbeddingBody) -> list[Prompt]:
    """Raises APIError."""
    if body.encoding_format not in (None, *ENCODINGS):
        raise invalid(f"encoding_format must be one of {', '.join(ENCODINGS)}", "encoding_format")
    return split_prompts(body.input, "input")


def answer(vectors: list[Row], model: str, encoding: str | None, num_tokens: int) -> dict[str, Any]:
    """The body of the response."""
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(vector: Row, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
