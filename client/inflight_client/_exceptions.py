"""The hierarchy of all exceptions of the client.

    ClientError
    ├── UsageError              an option or argument is wrong; nothing was sent
    ├── NotReady                the model did not become ready in the given time
    ├── LoadTestError           a load test could not be run or measured; partial results are never reported
    ├── TransportError          no answer was received; the request itself may be valid
    │   ├── ConnectError        no server listens at the address
    │   ├── ConnectionLost      the connection broke, or the answer ended without its last part
    │   └── DeadlineExceeded    `timeout` seconds passed; the server has been told to stop (also a TimeoutError)
    └── RequestError            the server answered with an error about this request
        ├── InvalidRequest      the request is malformed or can never be served   INVALID_ARGUMENT, ALREADY_EXISTS …
        ├── ModelNotFound       the server has no such model                      NOT_FOUND
        ├── Unavailable         the engine cannot serve now; try again later      UNAVAILABLE
        │   └── RequestRefused  the server's queue is full                        UNAVAILABLE, RESOURCE_EXHAUSTED
        ├── Cancelled           the request was stopped                           CANCELLED
        └── ServerFailure       everything else                                   INTERNAL, UNKNOWN …

Each has a message; those made from an answer also have gRPC's `code` and the `request_id`. A stream reports a request's
error as text only; the model `llm` appends the code in brackets, as the page of its tensors describes. This module
does not use grpc: a status is a name and a message.
"""

from __future__ import annotations

import re


class ClientError(Exception):
    """Base of all exceptions that the client raises on purpose."""

    def __init__(self, message: str, *, code: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """Name of the gRPC status code: UNKNOWN if the server gave none, empty if no server was involved."""
        self.request_id = request_id
        """Id of the request that failed, or empty."""


class UsageError(ClientError):
    """An option or argument is wrong; nothing was sent."""


class NotReady(ClientError):
    """The model did not become ready in the given time."""


class LoadTestError(ClientError):
    """A load test could not be run, or its measurements could not be read."""


class TransportError(ClientError):
    """No answer was received; the request itself may be valid."""


class ConnectError(TransportError):
    """No server listens at the address."""


class ConnectionLost(TransportError):
    """The connection broke, or the answer ended without its last part."""


class DeadlineExceeded(TransportError, TimeoutError):
    """`timeout` seconds passed before the answer was complete."""


class RequestError(ClientError):
    """The server answered with an error about this request."""


class InvalidRequest(RequestError):
    """The request is malformed or can never be served; also raised before anything is sent."""


class ModelNotFound(RequestError):
    """The server has no such model."""


class Unavailable(RequestError):
    """The engine cannot serve now; the same request may succeed later."""


class RequestRefused(Unavailable):
    """The server's queue is full."""


class Cancelled(RequestError):
    """The request was stopped before its end."""


class ServerFailure(RequestError):
    """The server failed while it worked on this request."""


_BY_CODE: dict[str, type[ClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "FAILED_PRECONDITION": InvalidRequest,
    "UNIMPLEMENTED": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "RESOURCE_EXHAUSTED": RequestRefused,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "INTERNAL": ServerFailure,
}
_CODED = re.compile(rf"(?P<sentence>.*) \[(?P<code>{'|'.join(_BY_CODE)})\]", re.DOTALL)

# gRPC reports UNAVAILABLE both when the server says so and when there is no server; only the message differs.
_NO_CONNECTION = (
    "failed to connect",
    "connection refused",
    "dns resolution failed",
    "name resolution",
    "errors resolving",
)
_BROKEN_CONNECTION = (
    "socket closed",
    "connection reset",
    "goaway",
    "broken pipe",
    "transport closed",
    "endpoint closing",
)
_UNKNOWN_MODEL = "unknown model"
# Message about a model that is being reloaded, for example after its ranks were lost.
_NOT_LOADED = "has no available versions"
_QUEUE_FULL = "exceeds maximum queue size"
# Parts, in lower case, of error messages by tritonserver itself and by other backends, which do not contain a code.
_CODES_OF_WORDS = {
    _UNKNOWN_MODEL: "NOT_FOUND",
    _QUEUE_FULL: "UNAVAILABLE",
    "server is stopping": "UNAVAILABLE",
    "server not ready": "UNAVAILABLE",
    "is not healthy": "UNAVAILABLE",  # the stub of the model has died
    "unexpected inference input": "INVALID_ARGUMENT",
    "unexpected inference output": "INVALID_ARGUMENT",
    "unexpected shape for input": "INVALID_ARGUMENT",
    "data-type is": "INVALID_ARGUMENT",
    "inputs but got": "INVALID_ARGUMENT",
    "invalid value type for": "INVALID_ARGUMENT",
    "request was cancelled": "CANCELLED",
}


def error_from_status(code: str, message: str, *, request_id: str = "") -> ClientError:
    """The exception for a gRPC status, given as the code's name ("UNAVAILABLE") and the message that came with it."""
    kind = _kind_of_connection(code, message.lower()) or _kind(code, message.lower())
    return kind(_sentence(kind, code, message), code=code, request_id=request_id)


def error_from_message(message: str, *, request_id: str = "") -> ClientError:
    """The exception for an error message in a stream, with or without a code in brackets at its end."""
    coded = _CODED.fullmatch(message)
    if coded:
        code, message = coded["code"], coded["sentence"]
    else:
        words = message.lower()
        code = next((code for sign, code in _CODES_OF_WORDS.items() if sign in words), "UNKNOWN")
    kind = _kind(code, message.lower())
    return kind(_sentence(kind, code, message), code=code, request_id=request_id)


def _kind(code: str, words: str) -> type[ClientError]:
    if code == "UNAVAILABLE" and _QUEUE_FULL in words:
        return RequestRefused
    if code == "NOT_FOUND" and _NOT_LOADED in words:
        return Unavailable
    return _BY_CODE.get(code, ServerFailure)


def _kind_of_connection(code: str, words: str) -> type[ClientError] | None:
    """The exception for a status that gRPC itself has produced, not a server; None for other statuses."""
    if code == "UNAVAILABLE" and any(sign in words for sign in _NO_CONNECTION):
        return ConnectError
    if code == "UNAVAILABLE" and any(sign in words for sign in _BROKEN_CONNECTION):
        return ConnectionLost
    return None


def _sentence(kind: type[ClientError], code: str, message: str) -> str:
    if kind is ConnectError:
        return f"no server answers there: {message.rpartition('UNKNOWN: ')[2]}"
    if kind is ConnectionLost:
        return f"the connection to the server broke: {message}"
    if kind is DeadlineExceeded:
        return "the answer was not complete before its deadline"
    return message or f"the server answered {code} without a reason"
