"""Requests waiting on the leader: higher priority first, in order of arrival among equal priorities."""

from __future__ import annotations

import heapq
from itertools import count

from inflight.request import Request


class RequestQueue:
    """Any waiting request can be removed; its heap entry becomes stale and is skipped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._waiting: dict[int, int] = {}  # request id -> its arrival number; a heap entry with another one is stale
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def push(self, request: Request) -> None:
        arrival = next(self._arrivals)
        self._waiting[request.request_id] = arrival
        heapq.heappush(self._heap, (-request.priority, arrival, request))

    def head(self) -> Request:
        """The next request, which stays. Raises IndexError if none is waiting."""
        while True:
            _, arrival, request = self._heap[0]
            if self._waiting.get(request.request_id) == arrival:
                return request
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        """Remove and return the next request. Raises IndexError if none is waiting."""
        request = self.head()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def discard(self, request_id: int) -> bool:
        """Remove a request; False if it is not waiting."""
        found = self._waiting.pop(request_id, None) is not None
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._waiting):
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2].request_id) == entry[1]]
            heapq.heapify(self._heap)
        return found
