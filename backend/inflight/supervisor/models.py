"""Finds models that were unloaded, but not by the supervisor, and loads them again.

A stub that unloads its own model writes the reason into a file with the model's name, in the folder UNLOADED of the run
directory. A model can also be unloaded through an open API, or by tritonserver itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from inflight.supervisor.admin import Admin

LOOK_PERIOD = 5.0
"""Seconds between two requests for tritonserver's index of its models."""

LOOK_TIMEOUT = 0.5
"""Seconds for such a request."""

UNLOADED_GRACE = 10.0
"""Seconds after which an unloaded model without a file in UNLOADED counts as down: a stub may be about to write the
file, and whoever unloaded the model may be about to load it again."""

UNLOAD_GRACE = 5.0
"""Most seconds to wait until an unload takes effect."""


class Models:
    """The models that one server was started with."""

    def __init__(
        self,
        admin: Admin,
        names: Collection[str],
        notes: Path,
        clock: Callable[[], float] = time.monotonic,
        attached: Mapping[str, str] | None = None,
    ) -> None:
        """`notes`: the folder UNLOADED. `attached`: those of the models that use the engine of another one, and
        which."""
        self._admin, self._names, self._notes, self._clock = admin, names, notes, clock
        self._attached = attached or {}
        self._next_look = 0.0
        self._down_since: dict[str, float] = {}
        self._lost: dict[str, str] = {}
        """Models without a stub, and the reasons, until they are reported as down."""

    def down(self) -> Iterator[tuple[str, str]]:
        """(model, reason) for each model that is down, once. One with a file in UNLOADED is reported at once."""
        unloaded = self._unloaded()
        lost, self._lost = self._lost, {}
        for name, reason in lost.items():
            unloaded.discard(name)
            yield name, reason
        for note in sorted(self._notes.iterdir()):
            if note.name in self._names:
                reason = note.read_text(encoding="utf-8", errors="replace").strip()
                note.unlink()
                unloaded.discard(note.name)
                yield note.name, reason or "it gave no reason"
        for name in sorted(unloaded):
            yield name, "it was unloaded, and not by this supervisor"

    def lose(self, name: str, reason: str) -> None:
        """A model's stub is dead, which tritonserver does not notice: unload the model, and report it as down."""
        self._admin.unload(name)
        self._lost[name] = reason

    def load(self, name: str, timeout: float) -> Loading:
        """Start to load a model that is down; `timeout` in seconds."""
        self._down_since.pop(name, None)
        return Loading(self._admin, name, timeout)

    def _unloaded(self) -> set[str]:
        """Models that have been unloaded for UNLOADED_GRACE."""
        now = self._clock()
        if now < self._next_look:
            return set()
        self._next_look = now + LOOK_PERIOD
        try:
            states = self._admin.states(LOOK_TIMEOUT)
        except OSError:
            # `health` reports a server that does not answer.
            return set()
        self._detach(states)
        down = {name for name in self._names if not states.get(name, set()) & {"READY", "LOADING"}}
        self._down_since = {name: self._down_since.get(name, now) for name in down}
        return {name for name, since in self._down_since.items() if now - since >= UNLOADED_GRACE}

    def _detach(self, states: Mapping[str, Collection[str]]) -> None:
        """Unload the models whose engine is not ready, so that they are not either. They are loaded with it."""
        for name, engine in self._attached.items():
            if "READY" in states.get(name, ()) and "READY" not in states.get(engine, ()):
                self._admin.unload(name)


class Loading:
    """Loads a model in a thread of its own, because that takes long."""

    def __init__(self, admin: Admin, name: str, timeout: float) -> None:
        self._admin, self._name, self._timeout = admin, name, timeout
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="load-model", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failure(self) -> str:
        """Why it failed, once it is over; "" if the model is ready."""
        return self._failure

    def _run(self) -> None:
        """Wait until the unload has taken effect, because a load before that would have none; then load."""
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + UNLOAD_GRACE
            while self._admin.is_model_ready(self._name) and time.monotonic() < deadline:
                time.sleep(0.05)
        self._failure = self._admin.load(self._name, timeout=self._timeout)
