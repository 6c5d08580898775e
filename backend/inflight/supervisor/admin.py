"""tritonserver's administration over gRPC: health, loading and unloading of models, and a request of one token.

Every call but `generate` has a deadline and raises OSError if the server does not answer. Knows nothing of processes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

CHANNEL_OPTIONS = (
    # Connect soon after a starting server has opened its port: gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    # Not through an HTTP proxy that the environment may name for external hosts.
    ("grpc.enable_http_proxy", 0),
)

UNHEALTHY_STUB = "is not healthy"
"""Part of tritonserver's own error message for a model whose stub has not responded for a second."""


class Admin:
    """The connection to one run of a server. The next run needs a new Admin."""

    def __init__(self, address: str, headers: Mapping[str, str], *, timeout: float = 5.0) -> None:
        """`address`: "host:port". `headers` go with every call; `timeout` in seconds."""
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        self._error: type[Exception] = grpc.RpcError
        self._messages: Any = service_pb2
        self._channel: Any = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = tuple(headers.items())
        self._timeout = timeout

    def close(self) -> None:
        """Close the connection and cancel all calls in progress."""
        self._channel.close()

    def is_ready(self) -> bool:
        """Whether all models that were requested at the start are ready."""
        return bool(self._call("ServerReady", self._messages.ServerReadyRequest()).ready)

    def check_live(self, timeout: float) -> None:
        """Return if the server answers within `timeout` seconds; raises OSError if not."""
        self._call("ServerLive", self._messages.ServerLiveRequest(), timeout)

    def is_model_ready(self, model: str) -> bool:
        return bool(self._call("ModelReady", self._messages.ModelReadyRequest(name=model)).ready)

    def states(self, timeout: float | None = None) -> dict[str, set[str]]:
        """States of each model's versions: READY, LOADING, UNLOADING or UNAVAILABLE; empty if it was never loaded."""
        index = self._call("RepositoryIndex", self._messages.RepositoryIndexRequest(), timeout)
        states: dict[str, set[str]] = {}
        for model in index.models:
            states.setdefault(model.name, set()).update({model.state} - {""})
        return states

    def load(self, model: str, *, timeout: float) -> str:
        """Load a model and wait until it is ready. Returns "", or the reason why it is not."""
        request = self._messages.RepositoryModelLoadRequest(model_name=model)
        return self._change("RepositoryModelLoad", request, timeout)

    def unload(self, model: str) -> str:
        """Unload a model: new requests are refused at once, and it is UNLOADING until those in flight have ended.
        Returns "", or the reason why it cannot be unloaded."""
        request = self._messages.RepositoryModelUnloadRequest(model_name=model)
        return self._change("RepositoryModelUnload", request, self._timeout)

    def generate(self, model: str) -> None:
        """Send a request of one token at the lowest priority to a model of our backend. Returns after its response, an
        error included; there is no deadline. Raises OSError if the connection ends first, or if tritonserver reports
        that the stub is dead."""
        messages = self._messages
        inputs = {"input_ids": 0, "max_tokens": 1}
        request = messages.ModelInferRequest(
            model_name=model,
            inputs=[
                messages.ModelInferRequest.InferInputTensor(name=name, datatype="INT32", shape=[1]) for name in inputs
            ],
            raw_input_contents=[struct.pack("<i", value) for value in inputs.values()],
            parameters={"request_priority": messages.InferParameter(int64_param=0)},
        )
        try:
            for answer in self._stub.ModelStreamInfer(iter([request])):
                if UNHEALTHY_STUB in answer.error_message:
                    raise OSError(answer.error_message)
        except self._error as error:
            raise OSError(f"the connection ended: {_details(error)}") from None

    def _change(self, method: str, request: object, timeout: float) -> str:
        try:
            self._call(method, request, timeout)
        except OSError as error:
            return str(error)
        return ""

    def _call(self, method: str, request: object, timeout: float | None = None) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout or self._timeout, metadata=self._metadata)
        except self._error as error:
            raise OSError(_details(error)) from None
        except ValueError as error:  # raised by a closed channel
            raise OSError(str(error)) from None


def _details(error: Any) -> str:
    return str(error.details() or error.code().name)
