"""Ranks as actors of a Ray cluster, on any of its machines; the first one on the front's.

    front ── child ──> ray_driver ══ Ray ══> ray_rank, an actor of each rank ── child ──> python -m inflight.worker

The front does not import Ray: its only child is the driver (`ray_driver.py`), which ends as soon as one of the ranks
does. Ray ends the actors with their driver, whatever that dies of, and each rank ends with its actor; so does a cluster
that the driver has started.
"""

from __future__ import annotations

import importlib.util
import os

from inflight.config import EngineConfig
from inflight.distributed.joining import AppointedMeeting
from inflight.errors import ConfigurationError
from inflight.executor.launchers.rank_processes import Command
from inflight.executor.wire.launch import Launch
from inflight.python_command import find_python, worker_environment

DRIVER = ("-m", "inflight.executor.launchers.ray_driver")
ABSENT = "executor ray needs Ray in this environment: pip install 'inflight[ray]'"


class Ray:
    """Implements LaunchCommand, for any number of ranks."""

    joining = AppointedMeeting()
    may_fork = False

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.num_replica_ranks

    def commands(self, launch: Launch) -> list[Command]:
        if importlib.util.find_spec("ray") is None:
            raise ConfigurationError(ABSENT)
        environment = {
            **worker_environment(os.environ),
            # Ray notes there where its cluster is. The driver's TMPDIR is another one.
            "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp",
            # The log of the ranks as they wrote it.
            "RAY_DEDUP_LOGS": "0",
            "RAY_COLOR_PREFIX": "0",
        }
        return [Command([str(find_python()), *DRIVER], environment)]

    def explain(self, reason: str) -> str:
        return f"the engine's {self._size} ranks did not start in Ray: {reason}"
