"""How well one text answers another: by a cross-encoder's score of both, else by the angle between their vectors."""

from __future__ import annotations

import numpy as np

from inflight.asking.ask import Ask, Prompt, TextPair
from inflight.asking.limit import Limit
from inflight.asking.refusal import Words
from inflight.asking.show import Show
from inflight.http.api_error import in_words, invalid
from inflight.http.embeddings import embedding_requests, unit_vectors
from inflight.http.pooled_rows import Row
from inflight.http.service import Service
from inflight.lora import LoRARequest
from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig
from inflight.request import Request

MAX_CHARS = 2**26
"""Of all pairs: one long question is tokenised with each of many documents."""


class Scoring:
    """Of the pairs of one body. `num_chars`: of all their texts."""

    def __init__(self, service: Service, pairs: list[TextPair], words: Words) -> None:
        """`words`: what the body calls the fields of an `Ask`. Raises APIError."""
        self._service = service
        self._limits = service.limits
        self._pairs = pairs
        self._words = words
        if self._limits.pooled == "scores" and self._limits.num_labels != 1:
            raise invalid(
                f"this model gives {self._limits.num_labels} scores of a pair, and none says how well one text answers "
                "the other",
                "model",
            )
        self.num_chars = sum(len(pair.first) + len(pair.second) for pair in pairs)
        if self.num_chars > MAX_CHARS:
            raise invalid(
                f"all pairs of texts have {self.num_chars} characters, more than {MAX_CHARS}", words["prompt"]
            )
        self._texts = list(dict.fromkeys(text for pair in pairs for text in (pair.first, pair.second)))
        """Each once: of which vectors are made, where no network reads both texts of a pair together."""

    def requests(self, adapter: LoRARequest | None, truncate_prompt_tokens: int | None) -> list[Request]:
        """For `truncate_prompt_tokens` see Limit. Raises APIError."""
        service, limits = self._service, self._limits
        if limits.pooled != "scores":
            texts: list[Prompt] = [*self._texts]
            return embedding_requests(
                texts,
                None,
                service.served,
                limits,
                adapter,
                service.vector_of,
                truncate_prompt_tokens=truncate_prompt_tokens,
                words=self._words,
            )
        ask = Ask(
            prompt=[*self._pairs],
            adapter=adapter,
            limit=Limit(truncate_prompt_tokens=truncate_prompt_tokens),
            show=Show(output=OutputConfig(additional_model_outputs=[AdditionalModelOutput(name=SCORES)])),
        )
        with in_words(self._words):
            return [prompt.request for prompt in service.served.prepare(ask, limits).prompts]

    def scores(self, rows: list[Row], *, is_raw: bool) -> list[float]:
        """Of each pair. `rows`: what the engine gives of `requests`. `is_raw`: whether a network's scores stay what
        they are; the cosine of two vectors always does."""
        if self._limits.pooled != "scores":
            vectors = dict(zip(self._texts, unit_vectors(rows, None), strict=True))
            return [float(np.dot(vectors[pair.first], vectors[pair.second])) for pair in self._pairs]
        found = np.array([row[0] for row in rows], np.float64)
        if not is_raw and self._service.score_of == "sigmoid":
            found = 0.5 * (1.0 + np.tanh(0.5 * found))  # which never overflows
        scores: list[float] = found.tolist()
        return scores
