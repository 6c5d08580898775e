"""The thread that checks regularly whether clients have disconnected and whether the engine is still there.

Asking tritonserver costs a round trip, so a thread of its own asks, for each request in flight at most once a period.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from inflight.executor.front.front import Front
from inflight.server.threads.sending_thread import log_failure
from inflight.server.work_items import WorkItems

logger = logging.getLogger(__name__)


class WatchThread:
    """Cancels requests whose client has disconnected; reports once that a lost engine could not be relaunched."""

    def __init__(
        self,
        executor: Front,
        items: WorkItems,
        period: float,
        on_engine_down: Callable[[], None],
        cancellation_log: tuple[str, str] | None = None,
    ) -> None:
        """`period` in seconds. `cancellation_log`: see Dialect."""
        self._executor = executor
        self._items = items
        self._period = period
        self._on_engine_down = on_engine_down
        self._cancellation_log = cancellation_log
        self._engine_was_down = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._period):
            try:
                self.look()
            except Exception as error:
                log_failure("watching requests", error)

    def look(self) -> None:
        """Check every request and the engine once."""
        for item in self._items.snapshot():
            if self._stopping.is_set():
                return
            if item.poll_cancelled():
                self._cancel(item.request.request_id)
        is_down = self._executor.is_down()
        if is_down and not self._engine_was_down:
            self._on_engine_down()
        self._engine_was_down = is_down

    def _cancel(self, request_id: int) -> None:
        if self._cancellation_log is None:
            self._executor.cancel_request(request_id)
            return
        before, after = self._cancellation_log
        logger.info(before)
        self._executor.cancel_request(request_id)
        logger.info(after)
