"""Responses that later requests may continue, read or delete: in this process's memory, within two bounds.

The one that was used the longest time ago is given up first. A response belongs to the tenant that asked for it; others
cannot tell whether it is there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredResponse:
    tenant: int
    """Who has asked for it (`guard.tenant_of`)."""
    body: bytes
    """The response as it was sent."""
    turns: tuple[bytes, ...]
    """The conversation up to its end: input and output of each turn in their order, each a JSON list of items. They are
    shared with the responses that it continues."""

    @property
    def num_bytes(self) -> int:
        """At most: as if no turn was shared."""
        return len(self.body) + sum(map(len, self.turns))


class ResponseStore:
    """Used on the event loop's thread."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Either 0 = none is kept."""
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        """By id, the one used last at the end."""
        self._num_bytes = 0

    @property
    def keeps_any(self) -> bool:
        return self._max_responses > 0 and self._max_bytes > 0

    def put(self, response_id: str, response: StoredResponse) -> None:
        """One that is larger than the whole store is not kept."""
        if response.num_bytes > self._max_bytes:
            return
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            _, given_up = self._responses.popitem(last=False)
            self._num_bytes -= given_up.num_bytes

    def find(self, response_id: str, tenant: int) -> StoredResponse | None:
        """None if it is not there, or belongs to another tenant."""
        response = self._responses.get(response_id)
        if response is None or response.tenant != tenant:
            return None
        self._responses.move_to_end(response_id)
        return response

    def take(self, response_id: str, tenant: int) -> StoredResponse | None:
        """The same, and forget it."""
        response = self.find(response_id, tenant)
        if response is not None:
            del self._responses[response_id]
            self._num_bytes -= response.num_bytes
        return response
