"""The hierarchy of all exceptions that inflight raises on purpose.

    InflightError
    ├── ConfigurationError      a key, a checkpoint or an installation is wrong: nothing starts; names the remedy
    │   └── InsufficientMemory  what was configured does not fit into the memory that is free now
    ├── UnusableWeights         a rank's weights in shared memory cannot be used: they must be read anew
    ├── RequestError            one request fails; other requests are not affected
    │   ├── InvalidRequest      the request is malformed or can never be served           INVALID_ARGUMENT
    │   ├── DuplicateRequest    its id is already in flight                               ALREADY_EXISTS
    │   ├── QueueFull           "Exceeds maximum queue size"                              UNAVAILABLE
    │   ├── RequestCancelled    the client disconnected or cancelled it                   CANCELLED
    │   ├── RequestTimedOut     it waited longer than its allotted time                   UNAVAILABLE
    │   ├── StepFailed          the forward pass that it was part of raised               INTERNAL
    │   └── ResponseFailed      its computed result could not be sent to the client       INTERNAL
    └── EngineUnavailable       ranks are not ready, or lost and the request cannot go on UNAVAILABLE

`code` is the name of the tritonserver error code of the answer, and `outcome` the label under which metrics count such
requests. Both are part of :class:`inflight.result.Response`, so that a rank can choose them without knowing
tritonserver.
"""

from __future__ import annotations


class InflightError(Exception):
    """Base of all errors whose message is written for the user."""

    code = "INTERNAL"
    outcome = "failed"


class ConfigurationError(InflightError):
    """The engine cannot start as configured; the message names the key and the remedy."""


class InsufficientMemory(ConfigurationError):
    """It cannot start now; it may be able to later, with the same configuration."""


class UnusableWeights(InflightError):
    """Ranks that find the same weights in shared memory fail as well, and those that read them anew do not."""


class RequestError(InflightError):
    """One request ends with an error; the engine and other requests continue."""


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
        """The default is TensorRT-LLM's message, which clients match on."""
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
