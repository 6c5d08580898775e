"""The Executor API: how the server side reaches an engine, wherever its ranks run.

Knows requests and responses; nothing of tensors, text or tritonserver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.request import Request, RequestLimits
from inflight.result import Response

if TYPE_CHECKING:
    from inflight.executor.wire.address import EngineAddress
    from inflight.executor.wire.launcher import Launcher


class Executor(ABC):
    """One engine, from launch to shutdown. `enqueue_request`, `cancel_request` and `await_responses` may be called from
    different threads; each request that was accepted ends with exactly one final Response, also when its ranks die
    (then with an error whose code is UNAVAILABLE)."""

    @property
    @abstractmethod
    def limits(self) -> RequestLimits:
        """What the engine can ever serve; known once it is ready."""

    @property
    @abstractmethod
    def device(self) -> str:
        """What its ranks compute on, cpu or cuda; known once it is ready."""

    @abstractmethod
    def start(self) -> None:
        """Launch the ranks and wait until they serve. Raises ConfigurationError with the ranks' own sentence."""

    @abstractmethod
    def next_request_id(self) -> int:
        """A fresh id, unique among all fronts of the engine."""

    @abstractmethod
    def enqueue_request(self, request: Request) -> None:
        """Hand over a request; never waits for the engine.

        Raises InvalidRequest (checked against `limits`), DuplicateRequest, QueueFull ("Exceeds maximum queue size") or
        EngineUnavailable. After an exception there will be no Response.
        """

    @abstractmethod
    def await_responses(self, timeout: float | None = None) -> list[Response]:
        """All responses that have come, at least one; [] after `timeout` seconds or once the executor is shut down."""

    @abstractmethod
    def cancel_request(self, request_id: int) -> None:
        """Ask for an early end. An active request answers with what it has (CANCELLED); unknown ids are ignored."""

    @abstractmethod
    def get_latest_iteration_stats(self) -> str | None:
        """The newest batch-manager JSON, or None if there is none since the last call."""

    @abstractmethod
    def num_requests_in_flight(self) -> int:
        """Requests that have not had their final response."""

    @abstractmethod
    def num_requests_queued(self) -> int:
        """Requests of all fronts that waited for a place among the active ones when the newest statistics came."""

    @abstractmethod
    def is_ready(self) -> bool:
        """True while every rank is alive and answering."""

    @abstractmethod
    def is_down(self) -> bool:
        """True if the ranks were lost and could not be brought back: requests are refused until they are."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the ranks; in-flight requests get an UNAVAILABLE error. Safe to call twice."""


def create_executor(
    config: EngineConfig,
    *,
    name: str = "",
    keep_trying: bool = True,
    on_engine_death: Callable[[str], None] | None = None,
) -> Executor:
    """An executor that starts ranks of its own in the way that `config.executor` names. Not started yet.

    `name`: of the engine, under which further fronts find it; "" for one that nobody else uses. For the other options
    see RemoteFront.
    """
    from inflight.executor.front.remote import RemoteFront
    from inflight.executor.wire.address import EngineAddress

    address = EngineAddress.of(name) if name else None
    launcher = _launcher(config, address)
    return RemoteFront(config, launcher, keep_trying=keep_trying, on_engine_death=on_engine_death)


def attach_executor(
    config: EngineConfig, name: str, *, on_engine_death: Callable[[str], None] | None = None
) -> Executor:
    """An executor of an engine that another process started under `name`; it loses it and finds it again. Of `config`
    only the timeouts count. Not started yet."""
    from inflight.executor.front.remote import RemoteFront
    from inflight.executor.launchers.attached import AttachedLauncher
    from inflight.executor.wire.address import EngineAddress

    return RemoteFront(config, AttachedLauncher(EngineAddress.of(name)), on_engine_death=on_engine_death)


def _launcher(config: EngineConfig, address: EngineAddress | None) -> Launcher:
    from inflight.executor.launchers.mpi import Mpi
    from inflight.executor.launchers.processes import ProcessLauncher
    from inflight.executor.launchers.uniproc import UniProc

    return ProcessLauncher(config, Mpi(config) if config.launcher == "mpi" else UniProc(), address)
