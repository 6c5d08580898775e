"""All requests that are in flight, by the engine's id and by Triton's id. Thread safe."""

from __future__ import annotations

import threading

from inflight.errors import DuplicateRequest
from inflight.server.work_item import WorkItem
from inflight.text.safe_text import safe_text


class WorkItems:
    """Holds a request from before it is enqueued until the engine's last response to it.

    Its Triton id is free again when its final response is sent, which may be earlier: a stop string ends a request for
    its client while ranks still compute the next step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_id: dict[int, WorkItem] = {}
        self._by_triton_id: dict[str, list[WorkItem]] = {}
        """Those without a final response: several where a request has several prompts."""

    def __len__(self) -> int:
        with self._changed:
            return len(self._by_id)

    def check_free(self, triton_id: str) -> None:
        """Raise DuplicateRequest if a request with this id is in flight. Any number of requests may have no id ("")."""
        with self._changed:
            if triton_id in self._by_triton_id:
                raise DuplicateRequest(f"requestId {safe_text(triton_id)} is already in progress, request is ignored.")

    def add(self, item: WorkItem) -> None:
        with self._changed:
            self._by_id[item.request.request_id] = item
            if item.request.client_id:
                self._by_triton_id.setdefault(item.request.client_id, []).append(item)

    def find(self, request_id: int) -> WorkItem | None:
        with self._changed:
            return self._by_id.get(request_id)

    def with_triton_id(self, triton_id: str) -> list[WorkItem]:
        with self._changed:
            return list(self._by_triton_id.get(triton_id, ()))

    def release_triton_id(self, item: WorkItem) -> None:
        with self._changed:
            items = self._by_triton_id.get(item.request.client_id, [])
            if item in items:
                items.remove(item)
                if not items:
                    del self._by_triton_id[item.request.client_id]

    def remove(self, item: WorkItem) -> bool:
        """Returns False if the item had been removed before."""
        self.release_triton_id(item)
        with self._changed:
            self._changed.notify_all()
            return self._by_id.pop(item.request.request_id, None) is not None

    def snapshot(self) -> list[WorkItem]:
        with self._changed:
            return list(self._by_id.values())

    def wait_until_empty(self, timeout: float) -> bool:
        """True once nothing is in flight; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._by_id, timeout)
