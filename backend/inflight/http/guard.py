"""Who may ask, how often, and how much: keys, rate, requests in progress, length of bodies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from starlette.types import Receive, Scope

from inflight.http.api_error import APIError, overloaded
from inflight.http.api_keys import ApiKeys
from inflight.http.dispatcher import ClientGone
from inflight.http.places import Places
from inflight.http.rate_limit import RateLimit

BODY_SECONDS, MAX_BODY_SECONDS = 10.0, 60.0
BODY_BYTES_PER_SECOND = 16 * 1024
"""A body must have come within BODY_SECONDS, and a second more for so many bytes that have come, at most
MAX_BODY_SECONDS: it takes one of the places for open requests."""


HELD = "inflight.held"
"""Key in an ASGI scope: see `held`."""


def held(scope: Scope, tenant: int, body: bytes) -> Scope:
    """The scope of a request that has been admitted, as this tenant's, and whose body has been read: whoever gets it
    need not know, and asks the guard as always."""
    return {**scope, HELD: (tenant, body)}


class Guard:
    """Used on the event loop's thread."""

    def __init__(self, keys: ApiKeys, rate: RateLimit, *, max_open_requests: int, max_body_bytes: int) -> None:
        self._keys = keys
        self._rate = rate
        self._places = Places(max_open_requests)
        self._max_body_bytes = max_body_bytes

    def check_key(self, scope: Scope) -> int | None:
        """Number of the request's key; None if none is needed. Raises APIError."""
        if not self._keys.are_needed:
            return None
        number = self._keys.find(header(scope, b"authorization"))
        if number is None and (key := header(scope, b"x-api-key")):  # Anthropic's clients have a header of their own
            number = self._keys.find(b"Bearer " + key)
        if number is None:
            raise APIError(
                401,
                "Incorrect API key provided: send one that this server knows, as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return number

    @contextlib.contextmanager
    def admitted(self, scope: Scope) -> Iterator[int]:
        """While a request of work is in progress: the number under which the engine knows its client (see
        Request.tenant). Raises APIError."""
        if HELD in scope:  # by whoever has chosen its model
            yield scope[HELD][0]
            return
        key = self.check_key(scope)
        seconds = self._rate.take(key)
        if seconds:
            raise APIError(
                429,
                "Rate limit reached: send fewer requests a second.",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(seconds)},
            )
        self._places.share(len(self._keys))
        if not self._places.take(key):
            whose = "" if key is None else " of this key"
            raise overloaded(
                503, f"{self._places.num_taken(key)} requests{whose} are in progress: there is no free place"
            )
        try:
            yield tenant_of(key)
        finally:
            self._places.give_back(key)

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises APIError as soon as it is too long, whether its length was announced or not, or too
        slow; and ClientGone."""
        if HELD in scope:
            held: bytes = scope[HELD][1]
            return held
        announced = header(scope, b"content-length")
        if announced.isdigit() and int(announced) > self._max_body_bytes:
            raise self._too_long()
        pieces, length = [], 0
        started = time.monotonic()
        while True:
            seconds = min(BODY_SECONDS + length / BODY_BYTES_PER_SECOND, MAX_BODY_SECONDS)
            try:
                message = await asyncio.wait_for(receive(), started + seconds - time.monotonic())
            except asyncio.TimeoutError:
                raise APIError(408, f"the body came too slowly: {length} bytes in {seconds:.0f} s") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message.get("body", b""))
            length += len(pieces[-1])
            if length > self._max_body_bytes:
                raise self._too_long()
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _too_long(self) -> APIError:
        return APIError(413, f"the body has more than {self._max_body_bytes} bytes", code="content_too_large")


def tenant_of(key: int | None) -> int:
    """Whose a request is, 0 = of those without a key. Only a key tells clients apart: a name or an address of their own
    would be a turn more for each invented."""
    return 0 if key is None else key + 1


def header(scope: Scope, name: bytes) -> bytes:
    """A header's value; b"" if it is not there."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
