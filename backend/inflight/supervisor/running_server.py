"""One run of a server: tritonserver's processes and all the checks of them.

Knows how to check a server; what follows from a failure is decided by the supervisor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

from inflight.open_requests import take_left
from inflight.run_directory import SIGNS, UNLOADED
from inflight.supervisor.admin import Admin
from inflight.supervisor.canary import Canary
from inflight.supervisor.health import TIMEOUT, Health, check_http
from inflight.supervisor.log import ServerLog
from inflight.supervisor.metrics import signs_of_work
from inflight.supervisor.models import Loading, Models
from inflight.supervisor.plan import Plan
from inflight.supervisor.stub_signs import StubSigns
from inflight.supervisor.tritonserver import DeadStub, Tritonserver, ended


class RunningServer:
    """The server starts when this is created, unless it is adopted: then it runs already, or has ended meanwhile."""

    def __init__(self, plan: Plan, log: ServerLog, tell: Callable[[str], None], *, is_adopted: bool = False) -> None:
        self._plan, self._tell = plan, tell
        if is_adopted:
            self.process = Tritonserver.adopt(plan.run_directory)
            log.follow(self.process.output)
        else:
            for note in (plan.run_directory / UNLOADED).iterdir():
                note.unlink()
            self.process = Tritonserver.start(plan.record.command, plan.environment, plan.run_directory)
            log.follow(self.process.output, self._hide_key)
        self.admin = Admin(plan.endpoints.grpc, plan.api_key.grpc_headers)  # imports gRPC, while the server starts
        self._signs = StubSigns(plan.run_directory / SIGNS)
        self._health = Health(self.admin, plan.endpoints.http)
        attached = plan.repository.attached
        names = (*plan.repository.models, *attached)
        self._models = Models(self.admin, names, plan.run_directory / UNLOADED, attached=attached)
        self._canaries = {model: self._canary(model) for model in plan.repository.answering}

    def is_ready(self) -> bool:
        """Whether all models that are loaded at the start are ready, also for HTTP, which tritonserver opens last."""
        with contextlib.suppress(OSError):
            if self.admin.is_ready():
                if self._plan.endpoints.http:
                    check_http(self._plan.endpoints.http, TIMEOUT)
                return True
        return False

    def failure(self) -> str:
        """What is wrong with the server as a whole; "" if nothing. To be called about twice a second."""
        if self.process.returncode is not None:
            return f"tritonserver ended ({ended(self.process.returncode)})"
        if (dead := self.process.dead_stub()) and (failure := self._lost(dead)):
            return failure
        if stub := self._signs.silent_stub(time.monotonic()):
            return f"the stub process {stub} hangs"
        if failure := self._health.failure():
            return failure
        if self._health.is_good:
            # Not asked if the server itself may hang, because the calls would only wait for their timeouts.
            for model, canary in self._canaries.items():
                if canary.is_dead():
                    return f"model {model} answers no request"
        return ""

    def models_down(self) -> Iterator[tuple[str, str]]:
        """(model, reason) for each model that went down, once. None while the server does not answer, because it could
        not load a model then."""
        return self._models.down() if self._health.is_good else iter(())

    def load(self, model: str) -> Loading:
        """Start to load a model that is down, or was not loaded yet."""
        if model in self._canaries:
            self._canaries[model] = self._canary(model)
        return self._models.load(model, self._plan.options.ready_timeout)

    def close(self) -> None:
        """Cancel all calls to a server that has ended."""
        self.admin.close()

    def _lost(self, stub: DeadStub) -> str:
        """What is wrong with the server as a whole now that a stub is dead.

        Nothing, if its model uses another one's engine and it held no request: then that model alone is loaded again.
        Requests that it held are answered by the end of tritonserver only."""
        left = take_left(self._plan.run_directory, stub.pid)
        if left is None or left.model not in self._plan.repository.attached:
            return f"the stub process {stub} ended"
        if left.num_open:
            return f"the stub process {left.instance} ended and left requests without an answer ({left.num_open})"
        self.process.give_up(stub)
        self._models.lose(left.model, f"its stub process {left.instance} ended")
        return ""

    def _canary(self, model: str) -> Canary:
        return Canary(
            partial(self.admin.generate, model),
            partial(signs_of_work, self._plan.endpoints.metrics, model),
            self._plan.options.canary_period,
        )

    def _hide_key(self) -> None:
        """Called at the first line of the log, when the server has read its command line."""
        try:
            self._plan.api_key.hide(self.process.pid)
        except OSError as error:
            if self.process.returncode is None:
                self._tell(f"every user of this machine can read the API key in tritonserver's command line: {error}")
