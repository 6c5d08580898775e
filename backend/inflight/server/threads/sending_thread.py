"""The only thread that sends responses to requests which the engine has accepted.

It takes all responses of the engine that have arrived, merges those of the same sequence, and sends one response for
each sequence. More arrive while it sends, so a busy server sends fewer and larger responses, and an idle one sends
every token at once. Where sending takes CPU time from the ranks, streams are also subject to a rate limit; their first
and last responses are not.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Container
from functools import partial

from inflight.errors import EngineUnavailable, RequestCancelled, ResponseFailed
from inflight.executor.front.front import Front
from inflight.result import Response
from inflight.server.threads.response_pace import ResponsePace
from inflight.server.work_item import WorkItem
from inflight.server.work_items import WorkItems

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
"""How long one wait for responses lasts at most; it only bounds the time until the thread notices that it must end."""
IDLE_SECONDS = 0.05
"""Pause after an empty list of responses: an executor that was shut down returns one without waiting."""
NOT_MADE = "the response could not be made"


class SendingThread:
    """Started once, finished after the executor was shut down."""

    def __init__(
        self, executor: Front, items: WorkItems, pace: ResponsePace, on_end: Callable[[WorkItem, Response], None]
    ) -> None:
        """`on_end(item, last)` is called once for each request, after the engine's `last` response to it."""
        self._executor = executor
        self._items = items
        self._pace = pace
        self._held: dict[int, WorkItem] = {}
        """Requests with undelivered output, by request id."""
        self._on_end = on_end
        self.has_failed = False
        """Whether the thread has ended by a fault: nothing is answered any more."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-send", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Let the thread end once all responses of the executor, which was shut down, are delivered. Does not wait."""
        self._stopping.set()

    def stop(self) -> None:
        """`finish`, and wait for the end of the thread."""
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
            self.has_failed = True
        for item in self._items.snapshot():
            gone = EngineUnavailable("the engine was shut down")
            self._end(item, Response.of_error(item.request.request_id, gone))

    def deliver(self, responses: list[Response]) -> None:
        """Merge the responses, and send those that the rate limit allows now. An exception fails only the request that
        caused it."""
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
            if request_id in last:
                self._end(item, last[request_id])
            elif item.is_answered:
                # A stop string was found: ranks still compute for it.
                self._guard(item, partial(self._executor.cancel_request, request_id))
            elif not item.is_finished:
                for index in item.take_stopped():
                    self._guard(item, partial(self._executor.cancel_sequence, request_id, index))

    def _send_ripe(self, touched: dict[int, WorkItem], last: Container[int]) -> None:
        """Send one response to each request that is not delayed by the rate limit; adds these requests to `touched`.
        Requests whose ids are in `last` are never delayed. Only responses that can wait count towards the limit,
        because the others would delay streams for as long as they arrive."""
        is_open = not self._pace.seconds_closed()
        ripe = [key for key, item in self._held.items() if is_open or key in last or not item.can_wait]
        num_paced = 0
        for request_id in ripe:
            item = self._held.pop(request_id)
            touched[request_id] = item
            num_paced += item.num_responses_ready if item.can_wait else 0
            if item.is_finished:
                # Before its final response, so that the client can use the id again once it has that.
                self._items.release_triton_id(item)
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
        code, sentence = last.error_code or "INTERNAL", last.error_msg or "the request ended without a result"
        try:
            self._items.release_triton_id(item)
            item.fail(code, sentence)
            if self._items.remove(item):
                self._on_end(item, last)
        except Exception as error:
            log_failure("ending a request", error)

    def _guard(self, item: WorkItem, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            log_failure("answering a request", error)
            item.is_broken = True
            self._items.release_triton_id(item)
            item.fail(ResponseFailed.code, NOT_MADE)


def log_failure(what: str, error: BaseException) -> None:
    """Log the error's type and traceback, but not its text, which may quote a prompt."""
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s failed: %s\n%s", what, type(error).__name__, places)
