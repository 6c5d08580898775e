"""Responses that have arrived and were not fetched yet, and how those who wait for them are told. Knows no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from inflight.result import Response


class ReadyResponses:
    """Those of one request stay in order; requests come in the order in which the first of each arrived. Takes no
    lock."""

    def __init__(self) -> None:
        self._by_request: dict[int, list[Response]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_request

    def extend(self, responses: Iterable[Response]) -> None:
        by_request = self._by_request
        for response in responses:
            by_request.setdefault(response.request_id, []).append(response)

    def count(self, request_id: int | None = None) -> int:
        """Number of responses of one request, or of all."""
        if request_id is not None:
            return len(self._by_request.get(request_id, ()))
        return sum(map(len, self._by_request.values()))

    def take(self, request_id: int) -> list[Response]:
        """Remove and return the responses of one request."""
        return self._by_request.pop(request_id, [])

    def take_all(self) -> list[Response]:
        """Remove and return all responses."""
        by_request, self._by_request = self._by_request, {}
        return [response for responses in by_request.values() for response in responses]


class ResponsesChanged(threading.Condition):
    """Notifies those who wait for responses, or their listener."""

    tell: Callable[[], None] | None = None
    """Tells the listener, if there is one."""

    def notify_all(self) -> None:
        super().notify_all()
        if self.tell is not None:
            self.tell()
