"""/metrics of a running server as numbers, and functions that wait until they have certain values. Knows no test."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from server_process import ServerProcess

OUTCOMES = "inflight_requests_total"
REQUESTS = "nv_trt_llm_request_metrics"
RELAUNCHING = "inflight_engine_relaunch_seconds_total"
KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"

DEADLINE = 180.0
"""Seconds after which something that should happen counts as never happening."""
PORT_SECONDS = 60.0
"""tritonserver opens the port of its metrics a moment after it is ready."""

_SERIES = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.MULTILINE)


class Metrics:
    """A snapshot of the series of the model `llm`."""

    def __init__(self, server: ServerProcess) -> None:
        text = _read(server.metrics_url)
        self._values = {
            (found["name"], frozenset(found["labels"].split(","))): float(found["value"])
            for found in _SERIES.finditer(text)
            if 'model="llm"' in found["labels"]
        }

    def of(self, name: str, **labels: str) -> float:
        """The sum of a family's series that carry these labels."""
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(value for (family, own), value in self._values.items() if family == name and wanted <= own)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """label's value -> the series' value."""
        prefix = f'{label}="'
        return {
            part.removeprefix(prefix).rstrip('"'): value
            for (family, own), value in self._values.items()
            if family == name
            for part in own
            if part.startswith(prefix)
        }

    @property
    def is_at_rest(self) -> bool:
        """No request is active and every block of the KV cache is free."""
        free, total = self.of("inflight_kv_blocks_free"), self.of("inflight_kv_blocks")
        return self.of(REQUESTS, request_type="active") == 0 and 0 < total == free


def until(holds: Callable[[], object], what: str, deadline: float = DEADLINE) -> None:
    """Poll until the condition holds; fails with `what` after `deadline` seconds."""
    limit = time.monotonic() + deadline
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < limit, f"not within {deadline:.0f} s: {what}"
        pause.wait(0.05)


def wait_for_rest(server: ServerProcess) -> Metrics:
    """Wait until the engine holds nothing of any request."""
    until(lambda: Metrics(server).is_at_rest, "no request is active and every KV block is free")
    return Metrics(server)


def _read(url: str) -> str:
    deadline = time.monotonic() + PORT_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE) as response:
                return str(response.read().decode())
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
