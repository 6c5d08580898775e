"""The threads that make requests of texts and hand them to the engine, so that execute() never waits for a tokenizer.

A megabyte takes a good part of a second. Short and long requests therefore have a thread each, and each thread serves
them in the order in which they came: neither kind can keep the other from its turn. Knows nothing of tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from inflight.server.tensors.client_request import ClientRequest
from inflight.server.threads.sending_thread import log_failure
from inflight.server.work_item import WorkItem

MAX_SHORT_LENGTH = 16_384
"""Characters and token ids of a request that is short: tokenised in a few milliseconds."""


class TokenizingThreads:
    """Started once, stopped once. What is put before stop() is taken before that returns."""

    def __init__(self, take: Callable[[WorkItem], None]) -> None:
        """`take(item)` sees to it that the item is answered, or gets to one who does."""
        self._short = _Lane("inflight-text-short", take)
        self._long = _Lane("inflight-text-long", take)

    def start(self) -> None:
        for lane in (self._short, self._long):
            lane.start()

    def put(self, item: WorkItem, length: int) -> None:
        """Hand over an item, which now belongs to one of the threads. `length`: see `text_length`."""
        lane = self._short if length <= MAX_SHORT_LENGTH else self._long
        lane.items.put(item)

    @property
    def num_waiting(self) -> int:
        return self._short.items.qsize() + self._long.items.qsize()

    def join(self) -> None:
        """Wait until nothing waits and nothing is being taken."""
        for lane in (self._short, self._long):
            lane.items.join()

    def stop(self) -> None:
        for lane in (self._short, self._long):
            lane.stop()


class _Lane:
    def __init__(self, name: str, take: Callable[[WorkItem], None]) -> None:
        self.items: queue.Queue[WorkItem | None] = queue.Queue()
        self._take = take
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        """False at the end. A function of its own, so that no item is held on to while the next one is waited for."""
        item = self.items.get()
        try:
            if item is not None:
                self._take(item)
        except Exception as error:
            log_failure("taking a request", error)
        finally:
            self.items.task_done()
        return item is not None


def text_length(client: ClientRequest) -> int:
    """Characters and token ids that must be gone through. Bad words are tokenised twice."""
    words = [*(client.stop_words or ()), *2 * (client.bad_words or [])]
    return len(client.text or "") + len(client.input_ids or ()) + sum(map(len, words))
