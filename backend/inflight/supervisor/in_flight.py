"""How many requests the engine still works on, as /metrics tells.

tritonserver's own word is not enough: it calls a model UNLOADING for as long as any client that once asked it keeps its
stream open, even if nothing is asked any more.
"""

from __future__ import annotations

import re
import urllib.request

SERIES = re.compile(r"^nv_trt_llm_request_metrics\{[^}]*request_type=\"(active|waiting)\"[^}]*\} (\S+)$", re.MULTILINE)


def requests_in_flight(metrics_address: str, *, timeout: float = 5.0) -> int | None:
    """Requests active or waiting, all models together; None if no model tells. Raises OSError if there is no answer."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=timeout) as response:
        return parse(response.read().decode())


def parse(text: str) -> int | None:
    """Read the same from the text of /metrics."""
    values = [float(found[2]) for found in SERIES.finditer(text)]
    return int(sum(values)) if values else None
