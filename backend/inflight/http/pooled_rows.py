"""What the engine gives of prompts in the place of tokens: a row of numbers of each."""

from __future__ import annotations

from inflight.asking.prepared import engines_refusal
from inflight.asking.refusal import Words
from inflight.asking.vectors import Row, row_of
from inflight.http.api_error import APIError, of_refusal, of_response
from inflight.http.dispatcher import Mailbox


async def collect_rows(mailbox: Mailbox, request_ids: list[int], words: Words) -> list[Row]:
    """The row of each request, in their order. `words`: what the body calls the fields of an `Ask`. Raises APIError and
    ClientGone."""
    found: dict[int, Row] = {}
    missing = set(request_ids)
    while missing:
        for response in await mailbox.take():
            if response.result is None:
                raise of_response(response, of_refusal(engines_refusal(response.error_msg), words).param)
            if (row := row_of(response.result)) is not None:
                found[response.request_id] = row
            if response.is_final and response.request_id not in found:
                raise APIError(504, "the engine's time for this request was over, or it was shut down")
            if response.is_final:
                missing.discard(response.request_id)
    return [found[request_id] for request_id in request_ids]
