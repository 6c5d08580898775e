"""The Executor API: how the server side reaches an engine, wherever its ranks run.

Knows requests and responses; does not know tensors, text or tritonserver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.generation_defaults import GenerationDefaults
from inflight.request import Request, RequestLimits
from inflight.result import Response

if TYPE_CHECKING:
    from inflight.executor.wire.address import EngineAddress
    from inflight.executor.wire.launcher import Launcher


class Executor(ABC):
    """One engine, from launch to shutdown. `enqueue_request`, `cancel_request` and `await_responses` may be called from
    different threads. Each accepted request ends with exactly one final Response; if the ranks die, it is an error with
    the code UNAVAILABLE."""

    @property
    @abstractmethod
    def limits(self) -> RequestLimits:
        """Bounds on the requests that the engine can serve; known once it is ready."""

    @property
    @abstractmethod
    def device(self) -> str:
        """Device type of its ranks, cpu or cuda; known once it is ready."""

    @property
    @abstractmethod
    def generation_defaults(self) -> GenerationDefaults:
        """How its checkpoint wants tokens chosen where a request does not say."""

    @abstractmethod
    def start(self) -> None:
        """Launch the ranks and wait until they serve. Raises ConfigurationError with the reason that the ranks gave."""

    @abstractmethod
    def next_request_id(self) -> int:
        """A fresh id, unique among all fronts of the engine."""

    @abstractmethod
    def enqueue_request(self, request: Request) -> None:
        """Send a request without waiting for the engine.

        Raises InvalidRequest (checked against `limits`), DuplicateRequest, QueueFull ("Exceeds maximum queue size") or
        EngineUnavailable. After an exception there will be no Response.
        """

    @abstractmethod
    def await_responses(self, timeout: float | None = None) -> list[Response]:
        """Wait for responses and return all that have arrived; [] after `timeout` seconds or once it is shut down."""

    @abstractmethod
    def cancel_request(self, request_id: int) -> None:
        """Ask for an early end. An active request ends with its tokens so far (CANCELLED); unknown ids are ignored."""

    @abstractmethod
    def get_latest_iteration_stats(self) -> str | None:
        """The newest statistics of the batch manager as JSON, or None if none arrived since the last call."""

    @abstractmethod
    def num_requests_in_flight(self) -> int:
        """Accepted requests that have not received their final response."""

    @abstractmethod
    def num_requests_queued(self) -> int:
        """Requests of all fronts that were waiting, not active, when the newest statistics were sent."""

    @abstractmethod
    def is_ready(self) -> bool:
        """True while the engine serves: every rank is alive and answers."""

    @abstractmethod
    def is_relaunching(self) -> bool:
        """True while lost ranks are being relaunched: requests are accepted and wait. After
        worker_start_timeout_ms at the latest the launch has failed, and the engine is down."""

    @abstractmethod
    def is_down(self) -> bool:
        """True if the ranks were lost and could not be relaunched: requests are refused until that succeeds."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the ranks that this executor started; requests in flight get an UNAVAILABLE error. Safe to call twice."""


def create_executor(
    config: EngineConfig,
    *,
    name: str = "",
    keep_trying: bool = True,
    on_engine_death: Callable[[str], None] | None = None,
) -> Executor:
    """An executor that launches its own ranks as `config.executor` says. It is returned unstarted.

    `name`: the engine's name, by which other fronts find it; "" if no other front uses it. For the other options see
    RemoteFront.
    """
    from inflight.executor.front.remote import RemoteFront
    from inflight.executor.wire.address import EngineAddress

    address = EngineAddress.of(name) if name else None
    launcher = _launcher(config, address)
    return RemoteFront(config, launcher, keep_trying=keep_trying, on_engine_death=on_engine_death)


def attach_executor(
    config: EngineConfig, name: str, *, on_engine_death: Callable[[str], None] | None = None
) -> Executor:
    """An executor of an engine that another process launched under `name`. It reconnects after that process relaunches
    the engine. Of `config` only the timeouts and the checkpoint's generation_config.json are used. It is returned
    unstarted."""
    from inflight.executor.front.remote import RemoteFront
    from inflight.executor.launchers.attached import AttachedLauncher
    from inflight.executor.wire.address import EngineAddress

    return RemoteFront(config, AttachedLauncher(EngineAddress.of(name)), on_engine_death=on_engine_death)


def _launcher(config: EngineConfig, address: EngineAddress | None) -> Launcher:
    from inflight.executor.launchers.mpi import Mpi
    from inflight.executor.launchers.processes import LaunchCommand, ProcessLauncher
    from inflight.executor.launchers.uniproc import UniProc

    commands: dict[str, Callable[[], LaunchCommand]] = {"uniproc": UniProc, "mpi": lambda: Mpi(config)}
    return ProcessLauncher(config, commands[config.launcher](), address)
