"""One run of a server: tritonserver's processes, and everybody who looks after them until they are gone.

Knows how a server is asked, not what follows from the answers: that is the supervisor's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

from inflight.run_directory import SIGNS, UNLOADED
from inflight.supervisor.admin import Admin
from inflight.supervisor.canary import Canary
from inflight.supervisor.health import Health
from inflight.supervisor.log import ServerLog
from inflight.supervisor.metrics import signs_of_work
from inflight.supervisor.models import Loading, Models
from inflight.supervisor.plan import Plan
from inflight.supervisor.stub_signs import StubSigns
from inflight.supervisor.tritonserver import Tritonserver, ended


class RunningServer:
    """Starts at once."""

    def __init__(self, plan: Plan, log: ServerLog, tell: Callable[[str], None]) -> None:
        self._plan, self._tell = plan, tell
        self.admin = Admin(plan.endpoints.grpc, plan.api_key.grpc_headers)
        self.process = Tritonserver(plan.command, plan.environment, plan.run_directory)
        log.follow(self.process.output, self._hide_key)
        self._signs = StubSigns(plan.run_directory / SIGNS)
        self._health = Health(self.admin, plan.endpoints.http)
        self._models = Models(self.admin, plan.repository.models, plan.run_directory / UNLOADED)
        self._canaries = {model: self._canary(model) for model in plan.repository.answering}

    def is_ready(self) -> bool:
        """All models are ready."""
        with contextlib.suppress(OSError):
            return self.admin.is_ready()
        return False

    def failure(self) -> str:
        """What is wrong with the server as a whole; "" if nothing. Ask often: twice a second."""
        if self.process.returncode is not None:
            return f"tritonserver ended ({ended(self.process.returncode)})"
        if stub := self.process.killed_stub():
            return f"the stub process {stub} ended"
        if stub := self._signs.silent_stub(time.monotonic()):
            return f"the stub process {stub} stands still"
        if failure := self._health.failure():
            return failure
        if self._health.is_good:
            # A server that may be dead itself would only keep this waiting.
            for model, canary in self._canaries.items():
                if canary.is_dead():
                    return f"model {model} answers no request"
        return ""

    def models_down(self) -> Iterator[tuple[str, str]]:
        """Each model that went down, once, with the reason. A server that does not answer cannot load it anyway."""
        return self._models.down() if self._health.is_good else iter(())

    def load(self, model: str) -> Loading:
        """Begin to load a model that is down."""
        if model in self._canaries:
            self._canaries[model] = self._canary(model)
        return self._models.load(model, self._plan.options.ready_timeout)

    def close(self) -> None:
        """End whatever still waits for an answer of a server that is gone."""
        self.admin.close()

    def _canary(self, model: str) -> Canary:
        return Canary(
            partial(self.admin.generate, model),
            partial(signs_of_work, self._plan.endpoints.metrics, model),
            self._plan.options.canary_period,
        )

    def _hide_key(self) -> None:
        """Called at the first line of the log, so when the command line has been read."""
        try:
            self._plan.api_key.hide(self.process.pid)
        except OSError as error:
            if self.process.returncode is None:
                self._tell(f"every user of this machine can read the API key in tritonserver's command line: {error}")
