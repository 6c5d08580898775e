"""Requests waiting on the leader: higher priority first.

Among equal priorities the clients take turns, a request each, so ten thousand requests of one client delay another's
by one. A client is a tenant of a front; its own requests go in order of arrival.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable

from inflight.request import Request

Client = tuple[Hashable, int]
"""A front, and the number of one of its tenants."""

Level = OrderedDict[Client, OrderedDict[int, Request]]
"""The requests of one priority: client -> its requests by id, in order of arrival. The first client has its turn."""


class RequestQueue:
    """Any waiting request can be removed."""

    def __init__(self) -> None:
        self._levels: dict[float, Level] = {}
        self._priorities: list[float] = []
        """A heap with the negative priority of each level, and of some that are gone."""
        self._places: dict[int, tuple[float, Client]] = {}
        """Priority and client of every waiting request."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._places

    def push(self, request: Request, front: Hashable = None) -> None:
        """`front`: which has sent it. It must not be waiting already."""
        client = (front, request.tenant)
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = OrderedDict()
            self._note_priority(request.priority)
        level.setdefault(client, OrderedDict())[request.request_id] = request
        self._places[request.request_id] = (request.priority, client)

    def head(self) -> Request:
        """The next request, which stays. Raises IndexError if none is waiting."""
        while -self._priorities[0] not in self._levels:
            heapq.heappop(self._priorities)
        first = next(iter(self._levels[-self._priorities[0]].values()))
        return next(iter(first.values()))

    def pop(self) -> Request:
        """Remove and return the next request. Raises IndexError if none is waiting."""
        request = self.head()
        priority, client = self._places[request.request_id]
        self._levels[priority].move_to_end(client)
        self.discard(request.request_id)
        return request

    def discard(self, request_id: int) -> bool:
        """Remove a request; False if it is not waiting."""
        if request_id not in self._places:
            return False
        priority, client = self._places.pop(request_id)
        level = self._levels[priority]
        del level[client][request_id]
        if not level[client]:
            del level[client]
        if not level:
            del self._levels[priority]
        return True

    def _note_priority(self, priority: float) -> None:
        heapq.heappush(self._priorities, -priority)
        if len(self._priorities) > 64 + 2 * len(self._levels):
            self._priorities = [-each for each in self._levels]
            heapq.heapify(self._priorities)
