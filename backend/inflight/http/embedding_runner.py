"""Sends texts to the engine, and collects their vectors while the client waits."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive

from inflight.http.dispatcher import Dispatcher, Mailbox
from inflight.http.embeddings import Vector, collect_vectors
from inflight.http.metrics import ServerMetrics
from inflight.http.respond import watch
from inflight.http.text_threads import TextThreads
from inflight.request import Request


class EmbeddingRunner:
    def __init__(self, dispatcher: Dispatcher, threads: TextThreads, metrics: ServerMetrics) -> None:
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
        dimensions: int | None,
    ) -> tuple[list[Vector], int]:
        """The vectors of the requests that `build` makes, on a text thread, and their tokens. Raises as `build` and
        `collect_vectors` do. For `tenant` and `num_bytes` see CallRunner."""
        mailbox = Mailbox(self._dispatcher, tenant)

        def prepare() -> tuple[list[int], int]:
            requests = build()
            return mailbox.send(requests), sum(len(request.input_token_ids) for request in requests)

        try:
            ids, num_tokens = await self._threads.run(num_bytes, prepare)
            watching = watch(receive, mailbox)
            try:
                vectors = await collect_vectors(mailbox, ids, dimensions)
            finally:
                watching.cancel()
        finally:
            mailbox.close()
        self._metrics.count_tokens(num_tokens, 0)
        return vectors, num_tokens
