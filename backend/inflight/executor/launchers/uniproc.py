"""One rank in a child process of its own, without MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from inflight.executor.launchers.python_command import WORKER, find_python, worker_environment
from inflight.executor.wire.launch import Launch, RankGroupKind


class UniProc:
    """Implements LaunchCommand, for an engine of one rank."""

    rank_group = RankGroupKind.SINGLE

    def __init__(self, program: Sequence[str] = WORKER) -> None:
        """`program`: arguments of the Python interpreter."""
        self._program = program

    def command(self, launch: Launch) -> tuple[list[str], Mapping[str, str]]:
        return [str(find_python()), *self._program], worker_environment(os.environ)

    def explain(self, reason: str) -> str:
        return f"the engine's rank did not start: {reason}"
