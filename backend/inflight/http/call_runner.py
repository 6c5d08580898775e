"""Makes a call of an HTTP request, sends it to the engine, and its answer to the client."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from inflight.http.call import Call
from inflight.http.dispatcher import Dispatcher, Mailbox
from inflight.http.metrics import ModelMetrics
from inflight.http.rendering import Rendering
from inflight.http.respond import Responder
from inflight.http.text_threads import TextThreads
from inflight.request_spans import RequestSpans


class CallRunner:
    def __init__(
        self, dispatcher: Dispatcher, threads: TextThreads, metrics: ModelMetrics, spans: RequestSpans | None = None
    ) -> None:
        """`spans`: see Responder."""
        self._dispatcher = dispatcher
        self._threads = threads
        self._metrics = metrics
        self._spans = spans

    async def run(
        self,
        build: Callable[[], tuple[Call, Rendering]],
        tenant: int,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        num_bytes: int,
        began: float,
    ) -> int:
        """Returns the HTTP status. `build` makes the call and says how it is answered, on a text thread. `tenant`: who
        asks. `num_bytes`: of the request's body. `began`: when it arrived, on the monotonic clock. Raises as `build`
        and Responder do."""
        mailbox = Mailbox(self._dispatcher, tenant)

        def prepare() -> tuple[Call, Rendering, list[int]]:
            call, rendering = build()
            return call, rendering, mailbox.send([prompt.request for prompt in call.prepared.prompts])

        try:
            call, rendering, ids = await self._threads.run(num_bytes, prepare)
        except BaseException:
            mailbox.close()
            raise
        responder = Responder(call, ids, mailbox, self._metrics, rendering, began, self._spans)
        return await responder.respond(scope, receive, send)
