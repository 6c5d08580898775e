"""What a row of tensors asks the engine for in the place of tokens, and what its answers become.

Knows the engine's requests and rows; nothing of threads and replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inflight.asking.ask import TextPair
from inflight.asking.limit import Limit
from inflight.asking.refusal import Refusal
from inflight.asking.scoring import Scoring
from inflight.asking.sentence_files import Activation
from inflight.asking.served import Served
from inflight.asking.text_prompts import NO_PROMPTS, TextPrompts
from inflight.asking.vectors import Row, embedding_requests, unit_vectors
from inflight.errors import InvalidRequest
from inflight.output_config import Pooling
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.pooled import EMBEDDING, RERANK, Embedded, Ranked

WORDS = {"truncate_prompt_tokens": "truncate"}
"""What both dialects call a field of `Ask`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledModel:
    """What is the same for all requests."""

    served: Served
    vector_of: Pooling
    score_of: Activation
    prompts: TextPrompts = NO_PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledAsk:
    """Of one row of tensors."""

    requests: Sequence[Request]
    answer: Callable[[list[Row]], object]
    """The engine's row of each request, in their order -> what the dialect's outputs are attributes of."""

    @property
    def num_tokens(self) -> int:
        return sum(len(request.input_token_ids) for request in self.requests)


def ask_vector(client: ClientRequest, model: PooledModel, limits: RequestLimits) -> PooledAsk:
    """Raises InvalidRequest."""
    try:
        requests = embedding_requests(
            [client.text or ""],
            client.dimensions,
            model.served,
            limits,
            None,
            model.vector_of,
            limit=_limit(client, limits),
            before=model.prompts.chosen(client.prompt_name or None, client.input_type or None),
        )
    except Refusal as refusal:
        raise InvalidRequest(refusal.said(WORDS | {"prompt": "text"})) from None

    def answer(rows: list[Row]) -> Embedded:
        (vector,) = unit_vectors(rows, client.dimensions)
        return Embedded(embeddings=vector, token_count=asked.num_tokens)

    asked = PooledAsk(requests=requests, answer=answer)
    return asked


def ask_scores(client: ClientRequest, model: PooledModel, limits: RequestLimits) -> PooledAsk:
    """Raises InvalidRequest."""
    query, passages = client.text or "", client.passages or []
    if not query:
        raise InvalidRequest("query is empty: give at least one character")
    if not passages:
        raise InvalidRequest("passage is empty: give at least one text")
    for place, passage in enumerate(passages):
        if not passage:
            raise InvalidRequest(f"passage {place} is empty: give at least one character")
    try:
        pairs = [TextPair(query, each) for each in passages]
        scoring = Scoring(pairs, model.served, limits, model.vector_of, model.prompts)
        requests = scoring.requests(None, _limit(client, limits))
    except Refusal as refusal:
        raise InvalidRequest(refusal.said(WORDS | {"prompt": "passage"})) from None

    def answer(rows: list[Row]) -> Ranked:
        return Ranked(
            scores=scoring.scores(rows, model.score_of),
            logit=scoring.scores(rows, "identity"),
            token_count=asked.num_tokens,
        )

    asked = PooledAsk(requests=requests, answer=answer)
    return asked


def _limit(client: ClientRequest, limits: RequestLimits) -> Limit:
    """Of an encoder's text the beginning is kept, of another network's the end. Raises InvalidRequest."""
    is_cut = _is_cut((client.truncate or "NONE").upper(), limits)
    return Limit(truncate_prompt_tokens=-1 if is_cut else None, allotted_time_ms=client.allotted_time_ms)


def _is_cut(truncate: str, limits: RequestLimits) -> bool:
    side, kept = ("END", "beginning") if limits.pooled else ("START", "end")
    if truncate not in ("NONE", side):
        raise InvalidRequest(f"truncate must be NONE or {side}: this model keeps the {kept} of a text that is too long")
    return truncate == side


ASKS: Mapping[str, Callable[[ClientRequest, PooledModel, RequestLimits], PooledAsk]] = {
    EMBEDDING.name: ask_vector,
    RERANK.name: ask_scores,
}
"""By the dialect's name."""
