"""Jobs of ranks that neither a front nor a supervisor starts: under mpiexec, torchrun, or with srun's variables.

with outer_job("torchrun", config, program=[fake_outer_rank.__file__]) as job:
    front = RemoteFront(config, ExternalLauncher(config, "llm"))
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port

from inflight.mpi_launcher import find_launcher, launcher_environment, launcher_options
from inflight.python_command import WORKER, worker_environment

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "llm"
SECONDS_TO_END = 180


@dataclass(frozen=True)
class Job:
    """`processes`: the launcher's, or with srun's variables those of the ranks."""

    processes: list[subprocess.Popen[bytes]]

    def end(self, number: int = signal.SIGTERM) -> None:
        """Signal them, and wait until all have ended."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)
        for process in self.processes:
            process.wait(SECONDS_TO_END)


@contextmanager
def outer_job(
    way: str, parameters: dict[str, str], *, size: int = 2, restarts: int = 0, program: Sequence[str] = WORKER
) -> Iterator[Job]:
    """`way`: mpiexec, torchrun or srun. `parameters`: in place of those of the default model. `restarts`: times that
    torchrun starts lost ranks again. `program`: arguments of the interpreter."""
    settings = {"tensor_parallel_size": str(size)} | parameters
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    arguments = [*program, "--config", str(MODEL), *given]
    environment = {**worker_environment(os.environ), "OMP_NUM_THREADS": "1"}
    commands: list[tuple[list[str], dict[str, str]]]
    if way == "mpiexec":
        launcher = find_launcher(Path(sys.executable), one_host=True)
        command = [str(launcher), *launcher_options(launcher), "-n", str(size), sys.executable, *arguments]
        commands = [(command, launcher_environment(environment, one_host=True))]
    elif way == "torchrun":
        options = ["--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        commands = [([sys.executable, "-m", "torch.distributed.run", *options, *arguments], environment)]
    else:
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": str(size)}
        commands = [
            ([sys.executable, *arguments], {**environment, **own, "SLURM_PROCID": str(rank)}) for rank in range(size)
        ]
    job = Job([])
    try:
        for command, variables in commands:
            job.processes.append(subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL))
        yield job
    finally:
        job.end()
