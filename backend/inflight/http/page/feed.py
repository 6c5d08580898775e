"""The live batch for those who watch it: one stream of events for all of them.

The engine makes statistics of requests for fronts that want them. While somebody watches, there is a front of its own
for that, and a thread that makes its statistics events; while nobody does, there is neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from inflight.errors import InflightError
from inflight.executor.front.front import Front
from inflight.http.api_error import overloaded
from inflight.http.connection import Connection
from inflight.http.page.events import LiveBatch, server_sent_event

logger = logging.getLogger(__name__)

EVENT_SECONDS = 0.1
MAX_VIEWERS = 16
MAX_UNREAD_BYTES = 2**20
"""Of one viewer: who reads more slowly is disconnected, and may come again."""


class BatchFeed:
    """All but the thread of a watch runs on the event loop's thread."""

    def __init__(self, attach: Callable[[], Front], *, max_viewers: int = MAX_VIEWERS) -> None:
        """`attach`: makes a front that keeps statistics, not started."""
        self._attach = attach
        self._max_viewers = max_viewers
        self._num_places = 0  # that are taken
        self._viewers: set[Connection] = set()
        self._watch: Watch | None = None

    @contextlib.contextmanager
    def viewing(self) -> Iterator[Callable[[Connection], None]]:
        """A place, as long as the context lasts, and what to call once the connection's stream has begun. Raises
        APIError if no place is free, and ConfigurationError."""
        if self._num_places >= self._max_viewers:
            raise overloaded(503, f"{self._max_viewers} viewers watch the batch, the most that this server takes")
        if self._watch is None:
            self._watch = Watch(self._attach(), asyncio.get_running_loop(), self._publish, self._lose)
        self._num_places += 1
        joined: list[Connection] = []

        def join(viewer: Connection) -> None:
            joined.append(viewer)
            self._viewers.add(viewer)

        try:
            yield join
        finally:
            self._viewers.difference_update(joined)
            self._num_places -= 1
            if not self._num_places and self._watch is not None:
                self._watch.end()
                self._watch = None

    def stop(self) -> None:
        """Wait for the thread, if somebody still watches."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _publish(self, watch: Watch, event: bytes) -> None:
        if watch is self._watch:
            for viewer in self._viewers:
                viewer.write_chunk(event)
                if viewer.num_unsent_bytes > MAX_UNREAD_BYTES:
                    viewer.abort()

    def _lose(self, watch: Watch) -> None:
        """There is no engine to watch: viewers come again."""
        if watch is self._watch:
            self._watch = None
            for viewer in self._viewers:
                viewer.abort()


class Watch:
    """From the first viewer's coming to the last one's leaving, or to the end of the engine's ranks."""

    def __init__(
        self,
        front: Front,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[Watch, bytes], None],
        lose: Callable[[Watch], None],
    ) -> None:
        self._front = front
        self._loop = loop
        self._publish, self._lose = publish, lose
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Soon; does not wait."""
        self._ending.set()

    def stop(self) -> None:
        """Wait until it has ended."""
        self._ending.set()
        self._front.shutdown()
        self._thread.join()

    def _run(self) -> None:
        batch = LiveBatch()
        try:
            with self._front as front:
                while not self._ending.wait(EVENT_SECONDS) and front.is_ready():
                    event = batch.advance(front.get_latest_iteration_stats(), front.get_latest_request_stats())
                    if event is not None:
                        self._call(self._publish, self, server_sent_event(event))
        except InflightError as error:
            logger.warning("the batch cannot be watched: %s", error)
        finally:
            self._call(self._lose, self)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, at the end
            self._loop.call_soon_threadsafe(function, *arguments)
