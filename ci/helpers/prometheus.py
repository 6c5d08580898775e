"""Prometheus and promtool for tests: `make prometheus` fetches them, or they are installed.

    with Prometheus(config, folder) as prometheus:
        prometheus.query('up{job="inflight"}')

Knows no metric.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
from free_ports import free_port
from server_process import ROOT, ServerProcess
from waiting import until

MONITORING = ROOT / "backend" / "monitoring"
FETCHED = ROOT / "build" / "prometheus" / "usr" / "bin"
CLIENT = httpx.Client(timeout=120, trust_env=False)


def located(program: str) -> str | None:
    """The path of `prometheus` or `promtool`."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), str(FETCHED)]))


def find(program: str) -> str:
    """The same. Skips the test if there is none."""
    found = located(program)
    if found is None:
        pytest.skip(f"there is no {program} here: `make prometheus` fetches it where apt has the package")
    return found


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with `text` on its standard input."""
    command = [find("promtool"), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=240, check=False)


def scraping(server: ServerProcess, folder: Path) -> Prometheus:
    """With the shipped configuration, but for the addresses and the intervals. `folder`: for its data."""
    config = (MONITORING / "prometheus.yml").read_text()
    config, number = re.subn(r"(scrape|evaluation)_interval: 10s", r"\1_interval: 1s", config)
    assert number == 2
    ours = {"localhost:8002": server.ready_endpoints.metrics, "localhost:9000": server.ready_endpoints.openai}
    for usual, address in {**ours, "alerts.yml": str(MONITORING / "alerts.yml")}.items():
        assert config.count(usual) == 1
        config = config.replace(usual, address)
    path = folder / "prometheus.yml"
    path.write_text(config)
    return Prometheus(path, folder)


class Prometheus:
    """A running Prometheus on a free port of loopback."""

    def __init__(self, config: Path, folder: Path) -> None:
        """`folder`: for its data."""
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                find("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> Prometheus:
        try:
            until(self._is_ready, "Prometheus is ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(120)
        self._log.close()

    def query(self, expression: str) -> list[float]:
        """The values of an instant vector. Raises AssertionError for an expression that is wrong."""
        return [float(series["value"][1]) for series in self._get("query", query=expression)["result"]]

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Each series between two seconds of the clock, with `metric`, its labels, and `values`."""
        found = self._get("query_range", query=expression, start=str(start), end=str(end), step=str(step))
        return list(found["result"])

    def alert_rules(self) -> list[dict[str, Any]]:
        """Each with name, state, health and lastError."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **parameters: str) -> Any:
        answer = CLIENT.get(f"{self._url}/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        with contextlib.suppress(httpx.TransportError):
            return CLIENT.get(f"{self._url}/-/ready").status_code == 200
        return False
