"""Whether a server answers: asked over every protocol that it serves, for one may be dead while another answers.

Knows nothing of models; whether an engine still works is the canary's to find out.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable

from inflight.supervisor.admin import Admin

PERIOD, TIMEOUT, STRIKES = 2.0, 1.0, 3
"""A server that fails so many checks in a row, this many seconds apart, counts as hung. A check costs the supervisor
about 2 ms."""


class Health:
    def __init__(self, admin: Admin, http_address: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`http_address`: "host:port", or "" for a server without HTTP."""
        self._admin, self._http_address, self._clock = admin, http_address, clock
        self._next_check = 0.0
        self._strikes = 0

    @property
    def is_good(self) -> bool:
        """As of the last check."""
        return self._strikes == 0

    def failure(self) -> str:
        """Check if it is time to. Returns what is wrong once that is certain, else ""."""
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
    """Returns if the server answers, whatever it says. Raises OSError."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
    except http.client.HTTPException as error:
        raise OSError(f"{address}: {error}") from error
    finally:
        connection.close()
