"""One rank in a child process of its own, without MPI."""

from __future__ import annotations

import os
from collections.abc import Sequence

from inflight.distributed.joining import OneRank
from inflight.executor.launchers.rank_processes import Command
from inflight.executor.wire.launch import Launch
from inflight.python_command import WORKER, find_python, worker_environment


class UniProc:
    """Implements LaunchCommand, for an engine of one rank."""

    joining = OneRank()

    def __init__(self, program: Sequence[str] = WORKER) -> None:
        """`program`: arguments of the Python interpreter."""
        self._program = program
        self.may_fork = program == WORKER

    def commands(self, launch: Launch) -> list[Command]:
        return [Command([str(find_python()), *self._program], worker_environment(os.environ))]

    def explain(self, reason: str) -> str:
        return f"the engine's rank did not start: {reason}"
