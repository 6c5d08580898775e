"""What a server says of its engine: checkpoint, type, ranks, device and versions.

They are the labels of the metric inflight_engine_info, which tritonserver's metrics port shows as well as the OpenAI
server. A server of another make has no such metric; then the report says that nothing is known.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

METRIC = "inflight_engine_info"
TIMEOUT = 5.0
USUAL_PORTS = ("8001", "8002")
"""tritonserver's for gRPC and for metrics."""
_OF_THE_SERIES = ("model", "version", "pid")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    engine: Mapping[str, str] = field(default_factory=dict)
    """Labels of the metric; empty if they are not known."""
    unknown: str = ""
    """Why they are not."""
    tritonserver: str = ""
    """Its version; empty for an OpenAI server."""

    def sentence(self) -> str:
        versions = f"tritonserver {self.tritonserver}" if self.tritonserver else ""
        if not self.engine:
            return "; ".join(filter(None, [f"engine unknown: {self.unknown}", versions]))
        told = self.engine.get
        ranks = told("num_ranks", "1")
        sizes = {"stages": told("pipeline_parallel_size", "1"), "replicas": told("data_parallel_size", "1")}
        ways = ", ".join(f"{size} {what}" for what, size in sizes.items() if size != "1")
        network = " ".join(filter(None, [told("checkpoint"), f"({told('architecture')})"]))
        split = f"{ranks} rank{'' if ranks == '1' else 's'}{f' ({ways})' if ways else ''}"
        where = f"{split} on {told('device_name') or told('device')}"
        own = (f"inflight {told('inflight_version')}", f"torch {told('torch_version')}", versions)
        return f"{network}, {told('dtype')}, {told('layers')} layers, {where}; {', '.join(filter(None, own))}"

    def to_dict(self) -> dict[str, Any]:
        return {"engine": dict(self.engine) or None, "unknown": self.unknown, "tritonserver": self.tritonserver}


def usual_metrics_address(url: str) -> str:
    """That of a tritonserver whose gRPC address is `url`, host:port; "" if its ports are not the usual ones: another
    server's facts would be worse than none."""
    host, _, port = url.rpartition(":")
    return f"{host}:{USUAL_PORTS[1]}" if port == USUAL_PORTS[0] else ""


def read_engine(url: str, model: str, api_key: str = "") -> ServerFacts:
    """`url`: of the metrics, host:port or a whole one; "" = not known. Of several models' series that of `model` is
    taken."""
    if not url:
        return ServerFacts(unknown="--metrics-url does not say where it tells its metrics")
    address = url if "://" in url else f"http://{url}/metrics"
    request = urllib.request.Request(address)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    # Without proxies, as gRPC and aiohttp connect: they would be measured, too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT) as response:
            text = response.read().decode("utf-8", "replace")
        return _engine(text, model) or ServerFacts(unknown=f"{address} has no {METRIC}")
    except (OSError, ValueError, urllib.error.URLError) as error:
        return ServerFacts(unknown=f"no metrics at {address} ({getattr(error, 'reason', error)})")


def _engine(text: str, model: str) -> ServerFacts | None:
    """None without the metric. Raises ValueError for what is not in Prometheus' form."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = "\n".join(line for line in text.splitlines() if line.startswith(METRIC))
    series = [sample.labels for family in text_string_to_metric_families(lines + "\n") for sample in family.samples]
    own = [labels for labels in series if labels.get("model", model) == model]
    if not (own or series):
        return None
    labels = (own or series)[0]
    return ServerFacts(engine={name: value for name, value in labels.items() if name not in _OF_THE_SERIES})
