"""Reads from /metrics how many requests the engines hold, and whether they make progress.

The state that tritonserver reports is not enough: a model stays UNLOADING for as long as any client that once used it
keeps its stream open, even if no request is in flight, and READY while its stub hangs.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable

from inflight.supervisor import processes

TIMEOUT, SIGNS_TIMEOUT = 5.0, 0.5
"""Seconds. Signs of work are read repeatedly, so one read must not wait long for a server that hangs."""

IN_FLIGHT = re.compile(
    r"^nv_trt_llm_request_metrics\{([^}]*request_type=\"(?:active|waiting)\"[^}]*)\} (\S+)$", re.MULTILINE
)
PID = re.compile(r"\bpid=\"(\d+)\"")
SIGNS = (
    r"^(?:inflight_requests_total|nv_trt_llm_general_metrics|inflight_engine_relaunch_seconds_total)"
    r"\{{[^}}]*model=\"{model}\"[^}}]*\}} \S+$"
)
"""Series that change with every request that ends, with every step, and all the time while ranks are relaunched."""


def requests_in_flight(address: str) -> int | None:
    """Active and waiting requests of all models together; None if there are no such metrics. `address`: "host:port".
    Raises OSError if the server does not answer."""
    return count_in_flight(_read(address, TIMEOUT))


def signs_of_work(address: str, model: str) -> tuple[str, ...]:
    """A value that changes when `model` works. Raises OSError if the server does not answer or has no such metrics."""
    signs = find_signs(_read(address, SIGNS_TIMEOUT), model)
    if not signs:
        raise OSError(f"there are no metrics of model {model}")
    return signs


def count_in_flight(text: str, is_alive: Callable[[int], bool] = processes.is_alive) -> int | None:
    """`requests_in_flight` from the text of /metrics. The series of a stub that was killed stay there as it left them,
    and count for nothing."""
    values = [float(value) for labels, value in IN_FLIGHT.findall(text) if all(map(is_alive, _pids(labels)))]
    return int(sum(values)) if values else None


def _pids(labels: str) -> list[int]:
    return [int(pid) for pid in PID.findall(labels)]


def find_signs(text: str, model: str) -> tuple[str, ...]:
    """`signs_of_work` from the text of /metrics."""
    return tuple(re.findall(SIGNS.format(model=re.escape(model)), text, re.MULTILINE))


def _read(address: str, timeout: float) -> str:
    # Not through an HTTP proxy that the environment may name for external hosts.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://{address}/metrics", timeout=timeout) as response:
        return str(response.read().decode())
