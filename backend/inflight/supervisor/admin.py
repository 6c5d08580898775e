"""tritonserver's administration over gRPC: health, loading and unloading models, and one request to see it work.

Every call but `generate` has a deadline; a server that does not answer is an OSError. Knows nothing of processes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

CHANNEL_OPTIONS = (
    # A server that is still starting is met soon after it has opened its port: gRPC's own pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # The environment may name a proxy for the world outside.
    ("grpc.enable_http_proxy", 0),
)

UNHEALTHY_STUB = "is not healthy"
"""What tritonserver itself answers in the name of a model whose stub has not moved for a second."""


class Admin:
    """One server's, for as long as it runs: the next one gets an Admin of its own."""

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
        """End the connection, and every call that is still under way."""
        self._channel.close()

    def is_ready(self) -> bool:
        """All models that were asked for at the start are ready."""
        return bool(self._call("ServerReady", self._messages.ServerReadyRequest()).ready)

    def check_live(self, timeout: float) -> None:
        """Returns if it answers at all."""
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
        """Load and wait until it is ready; "" or the reason why not."""
        request = self._messages.RepositoryModelLoadRequest(model_name=model)
        return self._change("RepositoryModelLoad", request, timeout)

    def unload(self, model: str) -> str:
        """Refuse new requests at once; those under way go on, so it is UNLOADING until they have ended. "" or the
        reason why not."""
        request = self._messages.RepositoryModelUnloadRequest(model_name=model)
        return self._change("RepositoryModelUnload", request, self._timeout)

    def generate(self, model: str) -> None:
        """Have an engine of ours make one token, after all other requests. Returns once it has answered, whatever it
        says, and waits for ever; raises OSError if the connection ends first, or tritonserver says that the stub is
        dead."""
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
        except ValueError as error:  # what a closed channel answers
            raise OSError(str(error)) from None


def _details(error: Any) -> str:
    return str(error.details() or error.code().name)
