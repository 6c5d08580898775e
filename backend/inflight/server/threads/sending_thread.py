"""The one thread that answers requests which the engine has accepted.

It takes every response that has come, merges those of the same sequence, and sends one response for each. While it
sends, more come: so a busy server sends fewer and larger responses, and an idle one every token at once. Where
answering takes cores from the ranks, streams under way also wait for a pace; first and last responses never do.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Container
from functools import partial

from inflight.errors import EngineUnavailable, RequestCancelled, ResponseFailed
from inflight.executor.executor import Executor
from inflight.result import Response
from inflight.server.threads.response_pace import ResponsePace
from inflight.server.work_item import WorkItem
from inflight.server.work_items import WorkItems

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
"""How long one wait for responses lasts; bounds nothing but the time to notice the end."""
IDLE_SECONDS = 0.05
"""Between two empty answers: an executor that was shut down gives them at once."""
NOT_MADE = "the response could not be made"


class SendingThread:
    """Started once, finished after the executor was shut down."""

    def __init__(
        self, executor: Executor, items: WorkItems, pace: ResponsePace, on_end: Callable[[WorkItem, Response], None]
    ) -> None:
        """`on_end(item, last)` is called once for each request, after the engine's `last` word on it."""
        self._executor = executor
        self._items = items
        self._pace = pace
        self._held: dict[int, WorkItem] = {}
        """Requests with news for their clients, by request id."""
        self._on_end = on_end
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-send", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """End once everything that the executor, now shut down, still had to say is delivered. Does not wait."""
        self._stopping.set()

    def stop(self) -> None:
        """Finish, and wait for the end."""
        self.finish()
        self._thread.join()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                wait_seconds = self._pace.seconds_closed() if self._held else WAIT_SECONDS
                responses = self._executor.await_responses(timeout=wait_seconds)
                if responses or self._held:
                    self.deliver(responses)
                elif self._stopping.wait(IDLE_SECONDS):
                    break
        except Exception as error:
            log_failure("the sending thread", error)
        for item in self._items.snapshot():
            gone = EngineUnavailable("the engine was shut down")
            self._end(item, Response.of_error(item.request.request_id, gone))

    def deliver(self, responses: list[Response]) -> None:
        """Merge, and send what must not wait or need not. A request that cannot be served fails alone."""
        touched: dict[int, WorkItem] = {}
        last: dict[int, Response] = {}
        for response in responses:
            item = self._items.find(response.request_id)
            if item is None:
                continue
            touched[response.request_id] = item
            if response.is_final:
                last[response.request_id] = response
            if response.result is not None:
                self._guard(item, partial(item.add, response.result))
        self._held |= {request_id: item for request_id, item in touched.items() if item.has_news}
        self._send_ripe(touched, last)
        for request_id, item in touched.items():
            if item.is_answered:
                self._items.release_triton_id(item)
            if request_id in last:
                self._end(item, last[request_id])
            elif item.is_answered:
                # A stop string was found: ranks still compute for it.
                self._guard(item, partial(self._executor.cancel_request, request_id))

    def _send_ripe(self, touched: dict[int, WorkItem], last: Container[int]) -> None:
        """What is ready for each request that the pace lets pass, and for those whose ids are in `last`; adds them to
        `touched`. Only who could have waited counts: others would close the pace for as long as they come."""
        is_open = not self._pace.seconds_closed()
        ripe = [key for key, item in self._held.items() if is_open or key in last or not item.can_wait]
        num_paced = 0
        for request_id in ripe:
            item = self._held.pop(request_id)
            touched[request_id] = item
            num_paced += item.num_responses_ready if item.can_wait else 0
            self._guard(item, item.deliver)
        self._pace.count(num_paced)

    def _end(self, item: WorkItem, last: Response) -> None:
        request_id = item.request.request_id
        if item.is_broken:
            last = Response.of_error(request_id, ResponseFailed(NOT_MADE))
        elif item.is_cancelled:
            last = Response.of_error(request_id, RequestCancelled("the request was cancelled"))
        elif last.error_code == RequestCancelled.code:
            last = Response.of_error(request_id, RequestCancelled(item.stopped_sentence))
        item.fail(last.error_code or "INTERNAL", last.error or "the request ended without a result")
        if self._items.remove(item):
            try:
                self._on_end(item, last)
            except Exception as error:
                log_failure("counting a request", error)

    def _guard(self, item: WorkItem, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            log_failure("answering a request", error)
            item.is_broken = True
            item.fail(ResponseFailed.code, NOT_MADE)


def log_failure(what: str, error: BaseException) -> None:
    """Where it happened and what kind it is, but not the error's text: it may quote a prompt."""
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed: %s\n%s", what, type(error).__name__, places)
