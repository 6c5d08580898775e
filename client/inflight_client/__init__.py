"""Client of inflight: text and tokens streamed over gRPC from the model `llm` of a tritonserver.

from inflight_client import Client

with Client("localhost:8001") as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

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
