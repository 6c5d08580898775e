"""Vectors of texts and scores of pairs of texts for programs of the library, by the rules of the servers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.asking.ask import Prompt, TextPair
from inflight.asking.limit import Limit
from inflight.asking.refusal import Refusal
from inflight.asking.scoring import Scoring
from inflight.asking.sentence_files import find_activation, find_pooling, find_prompts
from inflight.asking.served import Served
from inflight.asking.vectors import Row, embedding_requests, unit_vectors
from inflight.errors import InvalidRequest
from inflight.lora import LoRARequest
from inflight.output_config import Pooling
from inflight.request import Request
from inflight.request_limits import RequestLimits

Compute = Callable[[list[Request]], list[Row]]
"""Gives the engine's row of each request, in their order."""
OF_TEXTS = {"prompt": "texts", "adapter": "lora_request"}
OF_PAIRS = {"prompt": "documents", "adapter": "lora_request"}
"""Field of an `Ask` -> the argument that sets it."""


class TextPooling:
    """Safe to use from several threads."""

    def __init__(self, served: Served, compute: Compute, checkpoint: Path, pooling: Pooling | None) -> None:
        """`checkpoint`: the folder whose files say how vectors are made, unless `pooling` does, and what becomes of
        scores. Raises ConfigurationError."""
        self._served, self._compute = served, compute
        self._vector_of = pooling or find_pooling(checkpoint)
        self._score_of = find_activation(checkpoint)
        self._prompts = find_prompts(checkpoint, is_pooling_set=pooling is not None)

    def embed(
        self,
        texts: Sequence[Prompt],
        limits: RequestLimits,
        *,
        dimensions: int | None,
        prompt_name: str | None,
        input_type: str | None,
        limit: Limit,
        adapter: LoRARequest | None,
    ) -> list[Row]:
        """See GenerationExecutor.embed."""
        try:
            before = self._prompts.chosen(prompt_name, input_type)
            requests = embedding_requests(
                [*texts], dimensions, self._served, limits, adapter, self._vector_of, limit=limit, before=before
            )
        except Refusal as refusal:
            raise InvalidRequest(refusal.said(OF_TEXTS)) from None
        return unit_vectors(self._compute(requests), dimensions)

    def score(
        self,
        pairs: list[TextPair],
        limits: RequestLimits,
        *,
        use_activation: bool,
        limit: Limit,
        adapter: LoRARequest | None,
    ) -> list[float]:
        """See GenerationExecutor.score."""
        try:
            scoring = Scoring(pairs, self._served, limits, self._vector_of, self._prompts)
            requests = scoring.requests(adapter, limit)
        except Refusal as refusal:
            raise InvalidRequest(refusal.said(OF_PAIRS)) from None
        return scoring.scores(self._compute(requests), self._score_of if use_activation else "identity")


def pairs_of(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[TextPair]:
    """One text beside each of several, or as many of both. Raises InvalidRequest."""
    firsts = [queries] if isinstance(queries, str) else [*queries]
    seconds = [documents] if isinstance(documents, str) else [*documents]
    if not firsts or not seconds:
        raise InvalidRequest(f"there are {len(firsts)} queries and {len(seconds)} documents: give one of each at least")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidRequest(f"there are {len(firsts)} queries and {len(seconds)} documents: give one, or as many")
    return [TextPair(first, second) for first, second in zip(firsts, seconds, strict=True)]
