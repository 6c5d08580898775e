"""Sends prompts to the engine of which it gives a vector or scores, and collects these while the client waits."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive

from inflight.asking.refusal import Words
from inflight.asking.vectors import Row
from inflight.http.api_error import in_words
from inflight.http.dispatcher import Dispatcher, Mailbox
from inflight.http.metrics import ModelMetrics
from inflight.http.pooled_rows import collect_rows
from inflight.http.respond import watch
from inflight.http.text_threads import TextThreads
from inflight.request import Request

OF_VECTORS: Words = {"prompt": "input", "adapter": "model"}
"""Fields of an `Ask`, as bodies call them that ask for vectors."""


class PooledRunner:
    def __init__(self, dispatcher: Dispatcher, threads: TextThreads, metrics: ModelMetrics) -> None:
        self._dispatcher = dispatcher
        self._threads = threads
        self._metrics = metrics

    async def run(
        self,
        build: Callable[[], list[Request]],
        tenant: int,
        receive: Receive,
        *,
        num_bytes: int,
        words: Words,
    ) -> tuple[list[Row], int]:
        """The rows of the requests that `build` makes, on a text thread, and their tokens. A
        Refusal of `build` becomes an APIError; raises also what `collect_rows` does. For `tenant` and `num_bytes` see
        CallRunner, for `words` Call."""
        mailbox = Mailbox(self._dispatcher, tenant)

        def prepare() -> tuple[list[int], int]:
            with in_words(words):
                requests = build()
            return mailbox.send(requests), sum(len(request.input_token_ids) for request in requests)

        try:
            ids, num_tokens = await self._threads.run(num_bytes, prepare)
            watching = watch(receive, mailbox)
            try:
                rows = await collect_rows(mailbox, ids, words)
            finally:
                watching.cancel()
        finally:
            mailbox.close()
        self._metrics.count_tokens(num_tokens, 0)
        return rows, num_tokens
