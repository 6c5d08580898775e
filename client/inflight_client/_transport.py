"""The interface between the client and the network: a transport sends a call to a server and returns its replies.

A Call is a model's name and named arrays; a Reply is named arrays and whether it is the last. :mod:`._protocol` knows
the meaning of the arrays, :mod:`._grpc` their transfer; :mod:`._mock` answers without any server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""bool_, int32, uint64, float32 …; strings are arrays of `bytes` with dtype object."""


@dataclass(frozen=True)
class Call:
    """One request to one model."""

    model: str
    inputs: Mapping[str, Array]
    request_id: str = ""
    timeout: float | None = None
    """Seconds until the call ends with DeadlineExceeded; None for no deadline."""


@dataclass(frozen=True)
class Reply:
    """One response to a call. The last one has `final` set; it may be empty."""

    outputs: Mapping[str, Array] = field(default_factory=dict)
    final: bool = False


class ReplyStream(Protocol):
    """Replies of one call. Iterating may raise ClientError; `cancel` ends the call on both sides, at any time."""

    def __iter__(self) -> Iterator[Reply]: ...
    def cancel(self) -> None: ...


class AsyncReplyStream(Protocol):
    def __aiter__(self) -> AsyncIterator[Reply]: ...
    def cancel(self) -> None: ...


class Transport(Protocol):
    """Sends calls; may be used from many threads at once. Each method may raise ClientError."""

    def open(self, call: Call) -> ReplyStream: ...
    def model_ready(self, model: str, timeout: float) -> bool: ...
    def model_config(self, model: str, timeout: float) -> dict[str, Any]: ...
    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The same for asyncio; opening does not wait, so it is not a coroutine."""

    def open(self, call: Call) -> AsyncReplyStream: ...
    async def model_ready(self, model: str, timeout: float) -> bool: ...
    async def model_config(self, model: str, timeout: float) -> dict[str, Any]: ...
    async def close(self) -> None: ...


def strings(values: list[str] | tuple[str, ...]) -> Array:
    """Strings as an input array: UTF-8 `bytes`, dtype object."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = [value.encode("utf-8") for value in values]
    return array
