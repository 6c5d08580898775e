"""The seam between the client and the wire: an object that carries one call to a server and its replies back.

A Call is a model's name and named arrays; a Reply is named arrays and whether it is the last. What the arrays mean is
:mod:`._protocol`'s business, how they travel is :mod:`._grpc`'s; :mod:`._mock` answers without any server.
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
    """Replies of one call. Iterating raises ClientError; `cancel` ends both sides and may be called at any time."""

    def __iter__(self) -> Iterator[Reply]: ...
    def cancel(self) -> None: ...


class AsyncReplyStream(Protocol):
    def __aiter__(self) -> AsyncIterator[Reply]: ...
    def cancel(self) -> None: ...


class Transport(Protocol):
    """Carries calls; may be used from many threads at once. Each method raises ClientError."""

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
    """Texts as the array that travels: `bytes`, dtype object."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = [value.encode("utf-8") for value in values]
    return array
