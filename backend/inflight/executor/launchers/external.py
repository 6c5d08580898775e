"""Ranks that somebody else starts, by `mpiexec`, `torchrun`, `srun` or a service manager: found by the engine's name.

    torchrun --nproc-per-node 2 -m inflight.worker --config model_repository/llm

Starts no processes and ends none. A front waits for them, at the start and whenever they end, for
worker_start_timeout_ms. It shows the engine to the other fronts of its server under the same name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.launchers.found_ranks import FoundRanks
from inflight.executor.wire.address import EngineAddress, user_directory
from inflight.executor.wire.job import is_served
from inflight.executor.wire.launch import Launch
from inflight.run_directory import run_directory

logger = logging.getLogger(__name__)

PATHS = frozenset({"gpt_model_path", "tokenizer_dir", "speculative_model_dir", "lora_dir", "kv_transfer_key_file"})
FRONTS_OWN = frozenset({"executor"})
"""Keys by which front and ranks may differ."""


class ExternalLauncher:
    """Implements wire.launcher.Launcher."""

    owns_ranks = False
    starts_processes = False
    num_spares = 0

    def __init__(self, config: EngineConfig, name: str, address: EngineAddress | None = None) -> None:
        """`name`: of the engine. `address`: where the other fronts of this front's server find it. Raises
        ConfigurationError."""
        self._config = config
        self._found = EngineAddress.of(name, user_directory())
        self._shown = address if address != self._found else None
        self.absent = (
            f"no ranks serve the engine {name} here: start them, with python -m inflight.worker --config FOLDER under "
            "mpiexec, torchrun or srun"
        )
        self._is_first_look = True

    def open(self) -> ExternalLaunch | None:
        """See Launcher. Raises ConfigurationError if the ranks have another configuration than this front."""
        launch = self._find()
        if launch is None and self._is_first_look:
            seconds = self._config.worker_start_timeout_ms / 1000
            until = " until --ready-timeout" if run_directory() is not None else ""
            logger.warning("%s; waiting%s, %.0f s at most (worker_start_timeout_ms)", self.absent, until, seconds)
        self._is_first_look = False
        if launch is None:
            return None
        _check_equal(launch.parameters, self._config.to_parameters())
        return ExternalLaunch(launch, self._found, self._shown)

    def _find(self) -> Launch | None:
        socket_path = self._found.resolve()
        return None if socket_path is None or not is_served(socket_path) else Launch.beside(socket_path)

    def pids(self) -> list[int]:
        return []

    def end_spares(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing to do: it has started nothing."""


class ExternalLaunch:
    """Implements wire.launcher.RunningLaunch."""

    has_joined = True
    is_misconfigured = False

    def __init__(self, launch: Launch, found: EngineAddress, shown: EngineAddress | None) -> None:
        self.socket_path: Path = launch.socket_path
        self._found = found
        self._shown = shown
        self._ranks = FoundRanks(launch.rank_pids())

    def fds(self) -> list[int]:
        return self._ranks.fds()

    def publish(self) -> None:
        if self._shown is not None:
            self._shown.point_to(self.socket_path)

    def end_reason(self, ready_fds: Collection[object]) -> str:
        if self._ranks.has_ended(ready_fds):
            return "a rank has ended"
        return "" if self._found.resolve() == self.socket_path else "the engine's launch has ended"

    def wait_for_end(self, seconds: float) -> bool:
        return True

    def end(self) -> None:
        """The ranks keep running."""
        if self._shown is not None:
            self._shown.withdraw(self.socket_path)
        self._ranks.release()


def _check_equal(ranks: dict[str, str], front: dict[str, str]) -> None:
    """Raise ConfigurationError for the first key by which they differ."""
    for key, value in front.items():
        theirs = ranks.get(key, "")
        if key in PATHS and theirs and value:
            theirs, value = os.path.realpath(theirs), os.path.realpath(value)
        if theirs != value and key not in FRONTS_OWN:
            raise ConfigurationError(
                f"{key} is {value!r} here, and the ranks serve with {theirs!r}: give both the same, with this "
                "model as --config of the ranks"
            )
