"""Of an engine that generates no text: which paths serve it, and the refusal of all others."""

from __future__ import annotations

from inflight.http.api_error import invalid
from inflight.request_limits import RequestLimits

OF_VECTORS, OF_PAIRS = "/v1/embeddings and /api/embed", "/rerank and /score"


def check_generates(limits: RequestLimits) -> None:
    """Raise APIError unless the engine generates text."""
    if not limits.pooled:
        return
    if limits.pooled == "vectors":
        what = f"an encoder, which writes no text: {OF_VECTORS} make vectors of texts, {OF_PAIRS} compare texts by them"
    elif limits.num_labels == 1:
        what = f"a cross-encoder, which writes no text: {OF_PAIRS} score pairs of texts, {OF_VECTORS} make vectors"
    else:
        count = limits.num_labels
        what = f"an encoder with scores for {count} labels, which writes no text: {OF_VECTORS} make vectors of texts"
    raise invalid(f"this model is {what}", "model")
