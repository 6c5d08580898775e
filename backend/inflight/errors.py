"""Every exception that inflight raises on purpose, drawn once.

    InflightError
    ├── ConfigurationError      a key, a checkpoint or an installation is wrong: nothing starts; names the remedy
    ├── RequestError            one request is refused; its neighbours never notice
    │   ├── InvalidRequest      the client asked for something that cannot be             INVALID_ARGUMENT
    │   ├── DuplicateRequest    its id is already in flight                               ALREADY_EXISTS
    │   ├── QueueFull           "Exceeds maximum queue size"                              UNAVAILABLE
    │   ├── RequestCancelled    the client left or asked to stop                          CANCELLED
    │   ├── RequestTimedOut     it waited longer than the time it was allotted            UNAVAILABLE
    │   ├── StepFailed          the forward pass it was part of raised                    INTERNAL
    │   └── ResponseFailed      what was computed for it could not be answered            INTERNAL
    └── EngineUnavailable       ranks are dead, hung or not up yet                        UNAVAILABLE

`code` is the name of the tritonserver error code that the server side answers with, and `outcome` the word under which
such requests are counted. Both travel inside :class:`inflight.result.Response`, so that a rank can choose them without
knowing tritonserver.
"""

from __future__ import annotations


class InflightError(Exception):
    """Base of all errors that carry a sentence meant for a person."""

    code = "INTERNAL"
    outcome = "failed"


class ConfigurationError(InflightError):
    """The engine cannot start as configured; the message names the key and the remedy."""


class RequestError(InflightError):
    """One request ends with an error; everything else goes on."""


class InvalidRequest(RequestError):
    code = "INVALID_ARGUMENT"
    outcome = "rejected"


class DuplicateRequest(RequestError):
    code = "ALREADY_EXISTS"
    outcome = "rejected"


class QueueFull(RequestError):
    code = "UNAVAILABLE"
    outcome = "queue_full"

    def __init__(self, message: str = "Exceeds maximum queue size") -> None:
        """The default is TensorRT-LLM's sentence, which clients look for."""
        super().__init__(message)


class RequestCancelled(RequestError):
    code = "CANCELLED"
    outcome = "cancelled"


class RequestTimedOut(RequestError):
    code = "UNAVAILABLE"
    outcome = "timed_out"


class StepFailed(RequestError):
    code = "INTERNAL"
    outcome = "failed"


class ResponseFailed(RequestError):
    code = "INTERNAL"
    outcome = "failed"


class EngineUnavailable(InflightError):
    code = "UNAVAILABLE"
    outcome = "unavailable"
