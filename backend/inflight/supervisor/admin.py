"""tritonserver's administration over HTTP: health, and loading and unloading models.

Every call is one short request with a deadline; a server that does not answer is an OSError. Knows nothing of
processes.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelState:
    """One line of the repository's index: `state` is READY, LOADING, UNLOADING, UNAVAILABLE or "" (never loaded)."""

    name: str
    state: str
    reason: str


class Admin:
    def __init__(self, host: str, port: int, *, timeout: float = 5.0) -> None:
        self._host, self._port, self._timeout = host, port, timeout

    def is_ready(self) -> bool:
        """All models that were asked for at the start are ready."""
        return self._request("GET", "/v2/health/ready")[0] == 200

    def is_live(self) -> bool:
        """It answers at all."""
        return self._request("GET", "/v2/health/live")[0] == 200

    def is_model_ready(self, model: str) -> bool:
        return self._request("GET", f"/v2/models/{model}/ready")[0] == 200

    def index(self) -> list[ModelState]:
        """Every model of the repository with its state."""
        _, body = self._request("POST", "/v2/repository/index")
        return [
            ModelState(entry["name"], entry.get("state", ""), entry.get("reason", "")) for entry in json.loads(body)
        ]

    def load(self, model: str, *, timeout: float) -> str:
        """Load and wait until it is ready; "" or tritonserver's reason why not."""
        return self._change(model, "load", timeout)

    def unload(self, model: str) -> str:
        """Refuse new requests at once; those under way go on, so the index shows UNLOADING until they have ended."""
        return self._change(model, "unload", self._timeout)

    def _change(self, model: str, verb: str, timeout: float) -> str:
        status, body = self._request("POST", f"/v2/repository/models/{model}/{verb}", timeout)
        if status == 200:
            return ""
        try:
            return str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            return f"HTTP status {status}"

    def _request(self, method: str, path: str, timeout: float | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout or self._timeout)
        try:
            connection.request(method, path, body=b"{}" if method == "POST" else None)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path}: {error}") from error
        finally:
            connection.close()
