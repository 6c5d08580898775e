"""/metrics of a running server as numbers, and functions that wait until they have certain values. Knows no test."""

from __future__ import annotations

import re
import time
import urllib.request

from server_process import ServerProcess
from waiting import until

OUTCOMES = "inflight_requests_total"
ACCEPTED = "inflight_requests_accepted_total"
REQUESTS = "nv_trt_llm_request_metrics"
RELAUNCHING = "inflight_engine_relaunch_seconds_total"
KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"

DEADLINE = 180.0
"""Seconds after which something that should happen counts as never happening."""
SETTLING_SECONDS = 1.0
"""Metrics follow what they show by a tenth of a second: what is the same for so long is up to date."""
PORT_SECONDS = 60.0
"""tritonserver opens the port of its metrics a moment after it is ready."""

_SERIES = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


class Metrics:
    """A snapshot of the series of the model `llm`."""

    def __init__(self, server: ServerProcess) -> None:
        text = read_metrics(server)
        self.values = {
            (found["name"], frozenset(found["labels"].split(","))): float(found["value"])
            for found in _SERIES.finditer(text)
            if 'model="llm"' in found["labels"]
        }
        """(family, labels) -> value"""

    def of(self, name: str, **labels: str) -> float:
        """The sum of a family's series that carry these labels."""
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(value for (family, own), value in self.values.items() if family == name and wanted <= own)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """label's value -> the series' value."""
        prefix = f'{label}="'
        return {
            part.removeprefix(prefix).rstrip('"'): value
            for (family, own), value in self.values.items()
            if family == name
            for part in own
            if part.startswith(prefix)
        }

    @property
    def is_at_rest(self) -> bool:
        """No request is active and every block of the KV cache is free."""
        free, total = self.of("inflight_kv_blocks_free"), self.of("inflight_kv_blocks")
        return self.of(REQUESTS, request_type="active") == 0 and 0 < total == free


def wait_for_rest(server: ServerProcess) -> Metrics:
    """Wait until the engine holds nothing of any request."""
    until(lambda: Metrics(server).is_at_rest, "no request is active and every KV block is free")
    return Metrics(server)


def wait_until_settled(server: ServerProcess) -> Metrics:
    """The same, and until every request that has ended is counted, for who compares counts: a request is counted a
    moment after its client has the answer."""
    values = wait_for_rest(server).values
    since = time.monotonic()

    def has_settled() -> bool:
        nonlocal values, since
        found = Metrics(server)
        if found.values != values or not found.is_at_rest:
            values, since = found.values, time.monotonic()
        return time.monotonic() - since > SETTLING_SECONDS

    until(has_settled, "the metrics are up to date")
    return Metrics(server)


def read_metrics(server: ServerProcess) -> str:
    """The page as it is."""
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            with urllib.request.urlopen(server.metrics_url, timeout=DEADLINE) as response:
                return str(response.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
