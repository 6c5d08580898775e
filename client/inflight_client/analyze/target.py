"""What is analysed: where Model Analyzer finds the server, or how it starts one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from inflight_client._exceptions import ClientError, LoadTestError, UsageError

KEY_HEADER = "triton-grpc-protocol-inflight-api-key"
"""gRPC header of the key that opens a server's repository API."""
KEY_VARIABLE = "INFLIGHT_API_KEY"
"""Environment variable that hands the key to the process that sends it."""


class Target(Protocol):
    """The subject of an analysis."""

    @property
    def model(self) -> str: ...

    @property
    def grpc(self) -> str:
        """Address of the server's gRPC endpoint, "host:port"."""

    @property
    def parameters(self) -> dict[str, str]:
        """All of the engine's, as Model Analyzer finds them."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Model Analyzer's settings that say where the server is."""

    @property
    def api_key(self) -> str:
        """Of the server's repository API; "" if it is open."""

    def check(self, changes: dict[str, str]) -> None:
        """Raise an exception with one sentence if the engine cannot have these parameters."""

    def restore(self) -> None:
        """Give the server its own configuration back. Raises ClientError."""


@dataclass(frozen=True, kw_only=True)
class LocalTarget:
    """Servers of this machine, which Model Analyzer starts, one for each variant."""

    model: str
    grpc: str
    http: str
    metrics: str
    parameters: dict[str, str]
    repository: Path
    tritonserver: Path
    flags: Mapping[str, str]
    environment: Mapping[str, str]
    check: Callable[[dict[str, str]], None]
    api_key: str = field(default="", init=False)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "triton_launch_mode": "local",
            "model_repository": str(self.repository),
            "triton_server_path": str(self.tritonserver),
            "triton_server_flags": dict(self.flags),
            # The servers keep the folder for temporary files that Model Analyzer does not have.
            "triton_server_environment": {**self.environment, "TMPDIR": tempfile.gettempdir()},
            "triton_grpc_endpoint": self.grpc,
            "triton_http_endpoint": self.http,
            "triton_metrics_url": f"http://{self.metrics}/metrics",
        }

    def restore(self) -> None:
        """The servers have ended."""


class RemoteTarget:
    """A server that runs, under explicit model control. Its model is loaded again for each variant, and afterwards as
    it was. A context manager, which closes the connection."""

    def __init__(self, *, grpc: str, metrics_url: str, model: str, api_key: str = "") -> None:
        """Connect. Raises ClientError if the server cannot be reached, has no such model, or refuses the key."""
        from tritonclient.grpc import InferenceServerClient

        from inflight_client._grpc import check_url

        check_url(grpc)
        self.grpc, self.model, self.api_key = grpc, model, api_key
        self._metrics_url = metrics_url
        self._client = InferenceServerClient(grpc)
        self._headers = {KEY_HEADER: api_key} if api_key else {}
        self._call("get_model_repository_index")
        config = self._call("get_model_config", model, as_json=True)["config"]
        self._configuration = json.dumps(config)
        self.parameters = {key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()}

    def __enter__(self) -> RemoteTarget:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "triton_launch_mode": "remote",
            "triton_grpc_endpoint": self.grpc,
            "triton_metrics_url": self._metrics_url,
        }

    def check(self, changes: dict[str, str]) -> None:
        """The server itself checks, when it loads."""

    def restore(self) -> None:
        """Load the model with the configuration that it had. It is said in full: without one, tritonserver keeps the
        last one that it was given, as long as the files in its repository stay as they are."""
        self._call("load_model", self.model, config=self._configuration)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return getattr(self._client, method)(*arguments, headers=self._headers, **options)
        except InferenceServerException as error:
            raise _explained(error, self.grpc) from None


def _explained(error: Any, address: str) -> ClientError:
    reason = str(error.message() or error)
    if "restricted" in reason:
        return UsageError(
            f"the server at {address} lets only its operator load models: start it with inflight serve --api-key-file "
            "FILE, and give the same file to --api-key-file here"
        )
    return LoadTestError(f"{address}: {reason}")
