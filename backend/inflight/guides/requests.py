"""Requests as the engine takes them: with their guides translated."""

from __future__ import annotations

from msgspec import structs

from inflight.guided_decoding import GuidedDecodingBackend, GuidedDecodingParams
from inflight.guides.translate import translate
from inflight.request import Request
from inflight.request_limits import RequestLimits


def not_enforced(params: GuidedDecodingParams | None, limits: RequestLimits) -> tuple[tuple[str, str], ...]:
    """JSON pointer and keyword of what a guide that is not strict says, and its grammar does not. Empty where XGrammar
    follows guides, which does not tell. Raises InvalidRequest as `with_grammar` does."""
    if params is None or params.is_strict or limits.guided_decoding_backend is not GuidedDecodingBackend.LLGUIDANCE:
        return ()
    return translate(params).not_enforced


def with_grammar(request: Request, limits: RequestLimits) -> Request:
    """The request, with its guide as the engine's library takes it. Raises InvalidRequest where that cannot follow
    it."""
    params = request.guided_decoding_params
    if params is None or params.grammar or limits.guided_decoding_backend is not GuidedDecodingBackend.LLGUIDANCE:
        return request
    translated = structs.replace(params, grammar=translate(params).grammar)
    return structs.replace(request, guided_decoding_params=translated)
