"""Rerank and score: how well documents answer a question, with Jina's, Cohere's and vLLM's fields and paths."""

from __future__ import annotations

import time

import msgspec
from starlette.types import Receive, Scope, Send

from inflight.asking.ask import TextPair
from inflight.asking.limit import Limit
from inflight.asking.refusal import Words
from inflight.asking.scoring import Scoring
from inflight.http.api_error import in_words, invalid, unsupported
from inflight.http.call import fresh_id
from inflight.http.dialects.body import MAX_PROMPTS, decode_body
from inflight.http.endpoint import Handler, send_json
from inflight.http.service import Service
from inflight.request import Request

OF_RERANK = {"prompt": "documents", "adapter": "model"}
OF_SCORE = {"prompt": "text_2", "adapter": "model"}
REFUSED = dict.fromkeys(
    ("max_tokens_per_doc", "max_chunks_per_doc"), "set truncate_prompt_tokens, of question and document together"
) | {"rank_fields": "give each document as one text"}
"""Field of a rerank -> why it is not honoured."""


class Document(msgspec.Struct, frozen=True):
    text: str


class PairBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    """False: a network's scores as they are."""
    user: str | None = None


class RerankBody(PairBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank, /v2/rerank, /rerank"""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    rank_fields: list[str] | None = None


class ScoreBody(PairBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score, /score"""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankApi:
    def __init__(self, service: Service) -> None:
        self._service = service

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            **{path: {"POST": self._rerank} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
            **{path: {"POST": self._score} for path in ("/score", "/v1/score")},
        }

    async def _rerank(self, scope: Scope, receive: Receive, send: Send) -> int:
        service = self._service
        with service.guard.admitted(scope) as tenant:
            data = await service.guard.read_body(scope, receive)
            body = decode_body(data, RerankBody)
            model, _ = service.names.find(body.model)
            texts = documents_of(body)
            pairs = [TextPair(body.query, text) for text in texts]
            scores, num_tokens = await self._scores(pairs, body, OF_RERANK, tenant, receive)
            order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
            shows_text = body.return_documents is not False
            results = [
                {
                    "index": index,
                    **({"document": {"text": texts[index]}} if shows_text else {}),
                    "relevance_score": scores[index],
                }
                for index in order
            ]
            usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
            return await send_json(
                send, {"id": f"rerank-{fresh_id()}", "model": model, "usage": usage, "results": results}
            )

    async def _score(self, scope: Scope, receive: Receive, send: Send) -> int:
        service = self._service
        with service.guard.admitted(scope) as tenant:
            data = await service.guard.read_body(scope, receive)
            body = decode_body(data, ScoreBody)
            model, _ = service.names.find(body.model)
            scores, num_tokens = await self._scores(pairs_of(body), body, OF_SCORE, tenant, receive)
            return await send_json(
                send,
                {
                    "id": f"score-{fresh_id()}",
                    "object": "list",
                    "created": int(time.time()),
                    "model": model,
                    "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
                    "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
                },
            )

    async def _scores(
        self, pairs: list[TextPair], body: PairBody, words: Words, tenant: int, receive: Receive
    ) -> tuple[list[float], int]:
        """Of each pair, and the tokens of all requests."""
        service = self._service
        _, adapter = service.names.find(body.model)
        with in_words(words):
            scoring = Scoring(pairs, service.served, service.limits, service.vector_of, service.text_prompts)

        def build() -> list[Request]:
            return scoring.requests(adapter, Limit(truncate_prompt_tokens=body.truncate_prompt_tokens))

        rows, num_tokens = await service.pooled.run(build, tenant, receive, num_bytes=scoring.num_chars, words=words)
        activation = "identity" if body.use_activation is False else service.score_of
        return scoring.scores(rows, activation), num_tokens


def documents_of(body: RerankBody) -> list[str]:
    """Raises APIError."""
    for name, why in REFUSED.items():
        if getattr(body, name) is not None:
            raise unsupported(name, why)
    if not body.query:
        raise invalid("query is empty: give at least one character", "query")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    _check_texts(texts, "documents")
    if body.top_n is not None and body.top_n < 1:
        raise invalid(f"top_n must be at least 1, got {body.top_n}", "top_n")
    return texts


def pairs_of(body: ScoreBody) -> list[TextPair]:
    """One text beside each of several, or each beside the one at its place. Raises APIError."""
    firsts, seconds = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    _check_texts(firsts, "text_1")
    _check_texts(seconds, "text_2")
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise invalid(
            f"text_1 has {len(firsts)} entries and text_2 {len(seconds)}: give one text_1, or as many", "text_2"
        )
    return [TextPair(first, second) for first, second in zip(firsts, seconds, strict=True)]


def _check_texts(texts: list[str], field: str) -> None:
    if not texts:
        raise invalid(f"{field} is empty: give at least one text", field)
    if len(texts) > MAX_PROMPTS:
        raise invalid(f"{field} has {len(texts)} entries, more than {MAX_PROMPTS}", field)
    for index, text in enumerate(texts):
        if not text:
            raise invalid(f"{field}[{index}] is empty: give at least one character", field)
