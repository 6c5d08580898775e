"""One rank in a child process of its own, without MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

from inflight.executor.launch import Launch
from inflight.executor.process_executor import ProcessExecutor
from inflight.executor.python_command import WORKER, find_python, worker_environment


class UniProcExecutor(ProcessExecutor):
    """The executor for tensor_parallel_size 1."""

    program = tuple(WORKER)
    """Arguments of the interpreter; a test puts its own program here."""

    def _command(self, launch: Launch) -> tuple[list[str], Mapping[str, str]]:
        return [str(find_python()), *self.program], worker_environment(os.environ)
