"""Client of inflight: text and tokens streamed over gRPC from the model `llm` of a tritonserver.

from inflight_client import Client

with Client("localhost:8001") as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight_client._async_client import AsyncClient
    from inflight_client._client import Client
    from inflight_client._exceptions import (
        Cancelled,
        ClientError,
        ConnectError,
        ConnectionLost,
        DeadlineExceeded,
        InvalidRequest,
        LoadTestError,
        ModelNotFound,
        NotReady,
        RequestError,
        RequestRefused,
        ServerFailure,
        TransportError,
        Unavailable,
        UsageError,
    )
    from inflight_client._grpc import AsyncGrpcTransport, GrpcTransport
    from inflight_client._mock import AsyncMockTransport, MockTransport, text_reply
    from inflight_client._stream import AsyncCompletionStream, CompletionStream
    from inflight_client._transport import (
        AsyncReplyStream,
        AsyncTransport,
        Call,
        Reply,
        ReplyStream,
        Transport,
    )
    from inflight_client._types import Chunk, Completion, GeneratedSequence, GenerationOptions, Prompt, TokenLogProb

__version__ = "0.2.0"
"""The engine's; a test compares them."""

_HOMES = {
    "inflight_client._async_client": ("AsyncClient",),
    "inflight_client._client": ("Client",),
    "inflight_client._exceptions": (
        "Cancelled",
        "ClientError",
        "ConnectError",
        "ConnectionLost",
        "DeadlineExceeded",
        "InvalidRequest",
        "LoadTestError",
        "ModelNotFound",
        "NotReady",
        "RequestError",
        "RequestRefused",
        "ServerFailure",
        "TransportError",
        "Unavailable",
        "UsageError",
    ),
    "inflight_client._grpc": ("AsyncGrpcTransport", "GrpcTransport"),
    "inflight_client._mock": ("AsyncMockTransport", "MockTransport", "text_reply"),
    "inflight_client._stream": ("AsyncCompletionStream", "CompletionStream"),
    "inflight_client._transport": ("AsyncReplyStream", "AsyncTransport", "Call", "Reply", "ReplyStream", "Transport"),
    "inflight_client._types": (
        "Chunk",
        "Completion",
        "GeneratedSequence",
        "GenerationOptions",
        "Prompt",
        "TokenLogProb",
    ),
}
"""Module -> its public names, loaded when they are first used: the command line needs few of them, and grpc and NumPy
take a tenth of a second. Type checkers read the same from the imports above."""

__all__ = [
    "AsyncClient",
    "AsyncCompletionStream",
    "AsyncGrpcTransport",
    "AsyncMockTransport",
    "AsyncReplyStream",
    "AsyncTransport",
    "Call",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "CompletionStream",
    "ConnectError",
    "ConnectionLost",
    "DeadlineExceeded",
    "GeneratedSequence",
    "GenerationOptions",
    "GrpcTransport",
    "InvalidRequest",
    "LoadTestError",
    "MockTransport",
    "ModelNotFound",
    "NotReady",
    "Prompt",
    "Reply",
    "ReplyStream",
    "RequestError",
    "RequestRefused",
    "ServerFailure",
    "TokenLogProb",
    "Transport",
    "TransportError",
    "Unavailable",
    "UsageError",
    "text_reply",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'inflight_client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
