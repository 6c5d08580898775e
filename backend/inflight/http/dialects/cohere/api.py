"""Cohere's /v2/embed: vectors of texts in several types at once.

The types are made of the float32 vectors of length 1: base64 of their little-endian bytes; of binary and ubinary one
bit for each feature, 1 if it is above 0, the first feature as the highest bit of the first byte, and binary is ubinary
less 128, as sentence-transformers' quantize_embeddings has them.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from inflight.asking.ask import Prompt
from inflight.asking.refusal import Refusal
from inflight.asking.vectors import Row, cut_at_end, embedding_requests, unit_vectors
from inflight.http.api_error import APIError
from inflight.http.call import fresh_id
from inflight.http.dialects.body import decode_body
from inflight.http.dialects.cohere.fields import FEATURES_OF_BYTE, EmbedBody, EmbeddingType, texts_of
from inflight.http.endpoint import Handler, send_json
from inflight.http.service import Service
from inflight.request import Request

WORDS = {"prompt": "texts", "adapter": "model", "dimensions": "output_dimension"}
"""Field of an `Ask` -> what bodies call it."""
FLOATS: list[EmbeddingType] = ["float"]


def in_coheres_form(error: APIError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    return error.status, {"message": error.message}


class CohereApi:
    def __init__(self, service: Service) -> None:
        self.error_form = in_coheres_form
        self.below: tuple[str, ...] = ()
        self.loads_itself: frozenset[str] = frozenset()
        self.name_tag = ""
        self._service = service

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {"/v2/embed": {"POST": self._embed}}

    async def _embed(self, scope: Scope, receive: Receive, send: Send) -> int:
        service = self._service
        with service.guard.admitted(scope) as tenant:
            data = await service.guard.read_body(scope, receive)
            body = decode_body(data, EmbedBody)
            _, adapter = service.names.find(body.model)
            texts, dimensions = texts_of(body), body.output_dimension
            kinds = body.embedding_types or FLOATS

            def build() -> list[Request]:
                limits = service.limits
                features = dimensions or limits.hidden_size
                if features % FEATURES_OF_BYTE and not {"binary", "ubinary"}.isdisjoint(kinds):
                    sentence = "{0} must be a multiple of 8 for binary and ubinary, and is {count}"
                    raise Refusal("dimensions", sentence, count=features)
                before = service.text_prompts.chosen(input_type=body.input_type)
                given: list[Prompt] = [
                    before.text + text
                    if body.truncate == "NONE"
                    else cut_at_end(before.text + text, service.encoder, limits, body.max_tokens)
                    for text in texts
                ]
                return embedding_requests(
                    given, dimensions, service.served, limits, adapter, service.vector_of, begin_with=before
                )

            rows, num_tokens = await service.pooled.run(build, tenant, receive, num_bytes=len(data), words=WORDS)
            vectors = unit_vectors(rows, dimensions)
            return await send_json(
                send,
                {
                    "id": fresh_id(),
                    "response_type": "embeddings_by_type",
                    "texts": texts,
                    "embeddings": {kind: [_as(kind, vector) for vector in vectors] for kind in dict.fromkeys(kinds)},
                    "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
                },
            )


def _as(kind: EmbeddingType, vector: Row) -> list[float] | list[int] | str:
    if kind == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    if kind == "float":
        numbers: list[float] = vector.tolist()
        return numbers
    bits = np.packbits(vector > 0).astype(np.int16)
    packed: list[int] = (bits - 128 if kind == "binary" else bits).tolist()
    return packed
