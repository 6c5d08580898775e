"""Checks whether a server answers, over every protocol that it serves, because one may hang while another answers.

Knows nothing of models; `canary` checks whether an engine still works.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable

from inflight.supervisor.admin import Admin

PERIOD, TIMEOUT, STRIKES = 2.0, 1.0, 3
"""Seconds between checks, seconds for each to succeed, and the failures in a row after which a server counts as hung. A
check takes the supervisor about 2 ms."""


class Health:
    """The checks of one server."""

    def __init__(self, admin: Admin, http_address: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`http_address`: "host:port", or "" for a server without HTTP."""
        self._admin, self._http_address, self._clock = admin, http_address, clock
        self._next_check = 0.0
        self._strikes = 0

    @property
    def is_good(self) -> bool:
        """Whether the last check succeeded."""
        return self._strikes == 0

    def failure(self) -> str:
        """Check, if it is time to. Returns what is wrong after enough failures in a row, else ""."""
        now = self._clock()
        if now < self._next_check:
            return ""
        self._next_check = now + PERIOD
        protocol = "gRPC"
        try:
            self._admin.check_live(TIMEOUT)
            if self._http_address:
                protocol = "HTTP"
                check_http(self._http_address, TIMEOUT)
        except OSError:
            self._strikes += 1
            return f"tritonserver does not answer over {protocol}" if self._strikes >= STRIKES else ""
        self._strikes = 0
        return ""


def check_http(address: str, timeout: float) -> None:
    """Return if the server answers with any status; raises OSError if it does not. `timeout` in seconds."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    except http.client.HTTPException as error:
        raise OSError(f"{address}: {error}") from error
    finally:
        connection.close()
