"""One process for each rank of this machine, without MPI: children of the front, which join each other by a socket in
the launch's directory and broadcast over a ring in shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from inflight.config import EngineConfig
from inflight.distributed.joining import Meeting
from inflight.executor.launchers.rank_processes import Command
from inflight.executor.wire.launch import Launch
from inflight.python_command import WORKER, find_python, worker_environment

ONE_HOST = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Tensor collectives open no port that others can reach."""


class MultiProc:
    """Implements LaunchCommand, for any number of ranks."""

    joining = Meeting()

    def __init__(self, config: EngineConfig, program: Sequence[str] = WORKER) -> None:
        """`program`: arguments of the Python interpreter."""
        self._size = config.num_replica_ranks
        self._program = program
        self.may_fork = program == WORKER

    def commands(self, launch: Launch) -> list[Command]:
        arguments = [str(find_python()), *self._program]
        environment = {**worker_environment(os.environ), **ONE_HOST}
        return [Command(arguments, environment, rank) for rank in range(self._size)]

    def explain(self, reason: str) -> str:
        return f"the engine's {self._size} ranks did not find each other: {reason}"
