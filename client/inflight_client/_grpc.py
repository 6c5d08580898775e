"""The transports that reach a tritonserver: one gRPC stream per request, all of them over one channel.

With one stream per request, instead of one shared by many, gRPC's own mechanisms fit: the stream's deadline is the
request's deadline, cancelling it cancels only that request, and no idle stream remains that would keep a server from
exiting. The messages and stubs are tritonclient's.

A request's error arrives as a text message of its stream. With the header `triton_grpc_error` tritonserver would end
the stream with the error's status code instead. It is not sent, because that races with the regular end of the stream
and crashes tritonserver 2.51. After an error the stream is read to its end and not cancelled: see :mod:`._stream`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from inflight_client._exceptions import (
    ClientError,
    ModelNotFound,
    Unavailable,
    UsageError,
    error_from_message,
    error_from_status,
)
from inflight_client._transport import Call, Reply

DEFAULT_URL = "localhost:8001"

_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
# Reconnect at least every second, so that a starting server is found soon: gRPC's default pause grows to two minutes.
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_OTHER_FORM = re.compile(r"(?:unix|unix-abstract|dns|ipv4|ipv6|vsock|xds|passthrough):(?!\d+$)")
"""gRPC's own way of writing an address; a host may have one of these names."""


def check_url(url: str) -> None:
    """Raise UsageError if it is not "host:port", nor one of gRPC's own forms, as "unix:PATH". gRPC would look up "http"
    as a host's name, take 443 for a port that is missing, and one above 65535 modulo 65536."""
    scheme, found, rest = url.partition("://")
    if found and scheme.lower() in ("http", "https", "grpc", "grpcs"):
        host = rest.split("/")[0]
        raise UsageError(
            f"{url} is no gRPC address: write host and port of the server's gRPC endpoint without {scheme}://, as in "
            f"{host.rpartition(':')[0] or host or 'localhost'}:8001"
        )
    if _OTHER_FORM.match(url):
        return
    host, _, port = url.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{url!r} is no gRPC address: write host and port, as in {host or url or 'localhost'}:8001")


class GrpcTransport:
    """Sends calls from any number of threads over one channel to `url` ("host:port").

    With `credentials` (from grpc.ssl_channel_credentials) the channel is encrypted, otherwise it is not. Raises
    UsageError for what is no address of gRPC.
    """

    def __init__(self, url: str = DEFAULT_URL, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        check_url(url)
        options = list(_CHANNEL_OPTIONS)
        self._channel = (
            grpc.insecure_channel(url, options=options)
            if credentials is None
            else grpc.secure_channel(url, credentials, options=options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def open(self, call: Call) -> GrpcReplyStream:
        stream = self._stub.ModelStreamInfer(iter([_encode(call)]), timeout=call.timeout)
        return GrpcReplyStream(stream, call.request_id)

    def model_ready(self, model: str, timeout: float) -> bool:
        try:
            answer = self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=timeout)
        except grpc.RpcError as error:
            return _not_ready(_client_error(error))
        except ValueError:
            raise _closed() from None
        return bool(answer.ready)

    def model_config(self, model: str, timeout: float) -> dict[str, Any]:
        try:
            answer = self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=timeout)
        except grpc.RpcError as error:
            raise _client_error(error) from None
        return _config_dict(answer)

    def close(self) -> None:
        self._channel.close()


class GrpcReplyStream:
    """Replies of one call, decoded as they are read."""

    def __init__(self, stream: Any, request_id: str) -> None:
        self._stream = stream
        self._request_id = request_id

    def __iter__(self) -> Iterator[Reply]:
        failure: ClientError | None = None
        try:
            for message in self._stream:
                failure = failure or _failure(message, self._request_id)
                if failure is None:
                    yield _decode(message)
        except grpc.RpcError as error:
            failure = failure or _client_error(error, self._request_id)
        if failure is not None:
            raise failure

    def cancel(self) -> None:
        self._stream.cancel()


class AsyncGrpcTransport:
    """The same for asyncio. The channel is created at first use, in the event loop that uses it."""

    def __init__(self, url: str = DEFAULT_URL, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        check_url(url)
        self._url = url
        self._credentials = credentials
        self._channel: Any = None
        self._stub: Any = None

    def open(self, call: Call) -> AsyncGrpcReplyStream:
        stub = self._connected()
        stream = stub.ModelStreamInfer(iter([_encode(call)]), timeout=call.timeout)
        return AsyncGrpcReplyStream(stream, call.request_id)

    async def model_ready(self, model: str, timeout: float) -> bool:
        try:
            answer = await self._connected().ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=timeout)
        except grpc.RpcError as error:
            return _not_ready(_client_error(error))
        except grpc.aio.UsageError:
            raise _closed() from None
        return bool(answer.ready)

    async def model_config(self, model: str, timeout: float) -> dict[str, Any]:
        try:
            answer = await self._connected().ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=timeout)
        except grpc.RpcError as error:
            raise _client_error(error) from None
        return _config_dict(answer)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _connected(self) -> Any:
        if self._stub is None:
            options = list(_CHANNEL_OPTIONS)
            self._channel = (
                grpc.aio.insecure_channel(self._url, options=options)
                if self._credentials is None
                else grpc.aio.secure_channel(self._url, self._credentials, options=options)
            )
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._stub


class AsyncGrpcReplyStream:
    def __init__(self, stream: Any, request_id: str) -> None:
        self._stream = stream
        self._request_id = request_id
        self._cancelled = False

    async def __aiter__(self) -> AsyncIterator[Reply]:
        failure: ClientError | None = None
        try:
            async for message in self._stream:
                failure = failure or _failure(message, self._request_id)
                if failure is None:
                    yield _decode(message)
        except grpc.RpcError as error:
            failure = failure or _client_error(error, self._request_id)
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            # grpc.aio raises CancelledError in the reader of a cancelled call, as if the reading task were cancelled.
            failure = error_from_status("CANCELLED", "the stream was closed", request_id=self._request_id)
        if failure is not None:
            raise failure

    def cancel(self) -> None:
        self._cancelled = True
        self._stream.cancel()


def _encode(call: Call) -> Any:
    request = service_pb2.ModelInferRequest(model_name=call.model, id=call.request_id)
    request.parameters[_EMPTY_FINAL].bool_param = True
    for name, array in call.inputs.items():
        datatype = np_to_triton_dtype(array.dtype)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        raw = _serialized_strings(array) if datatype == "BYTES" else array.tobytes()
        request.raw_input_contents.append(raw)
    return request


def _serialized_strings(array: Any) -> bytes:
    serialized = serialize_byte_tensor(array)
    return bytes(serialized.item()) if serialized.size else b""


def _failure(message: Any, request_id: str) -> ClientError | None:
    return error_from_message(message.error_message, request_id=request_id) if message.error_message else None


def _decode(message: Any) -> Reply:
    response = message.infer_response
    result = InferResult(response)
    outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
    return Reply(outputs=outputs, final=response.parameters[_FINAL].bool_param)


def _client_error(error: Any, request_id: str = "") -> ClientError:
    return error_from_status(error.code().name, error.details() or "", request_id=request_id)


def _closed() -> ClientError:
    """What gRPC says of a channel that was closed, by an exception of no status."""
    return error_from_status("CANCELLED", "the client was closed")


def _not_ready(error: ClientError) -> bool:
    """False if the error only means that the model is not ready yet; raises any other error."""
    if isinstance(error, ModelNotFound | Unavailable) or error.code in (
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "INVALID_ARGUMENT",
    ):
        return False
    raise error from None


def _config_dict(answer: Any) -> dict[str, Any]:
    config: dict[str, Any] = MessageToDict(answer.config, preserving_proto_field_name=True)
    return config
