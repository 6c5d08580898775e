"""Rank 0 of an MPI job in which this process was started as rank 0: TensorRT-LLM's leader mode.

    mpiexec -n 1 tritonserver --model-repository=… : -n N-1 python -m inflight.worker

No MPI call is made in this process. Rank 0 is its child and joins the job in its place, with the variables and the
connection to `mpiexec` that it inherits. A process can join an MPI job only once, so rank 0 outlives launch and front:
after a reload the next front posts its launch to it (`wire/job.py`), with whatever configuration, and all ranks load
anew. A rank that dies ends the MPI job, this process included. Whoever started `mpiexec` starts it again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from inflight.config import EngineConfig
from inflight.distributed.joining import OuterJob
from inflight.distributed.outer_job import MPI_RANKS, find_outer_job
from inflight.errors import ConfigurationError
from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.job import JobFolder, has_ended
from inflight.executor.wire.launch import Launch
from inflight.python_command import WORKER, find_python, worker_environment

LOOK_SECONDS = 0.02
"""How often it is looked whether the ranks have left the launch."""
HOW = "mpiexec -n 1 tritonserver … : -n {others} python -m inflight.worker"


class MpiLeader:
    """Implements wire.launcher.Launcher."""

    owns_ranks = True
    starts_processes = False
    num_spares = 0
    absent = "the MPI job's ranks did not take the launch"

    def __init__(
        self, config: EngineConfig, address: EngineAddress | None = None, *, program: Sequence[str] = WORKER
    ) -> None:
        """`address`: where other fronts find the engine; None = no other front can. `program`: arguments of the Python
        interpreter. Raises ConfigurationError if this process is not rank 0 of a job of the right size."""
        size = config.num_replica_ranks
        if not leads_mpi_job(size):
            raise ConfigurationError(
                f"executor mpi_leader needs an MPI job of {size} processes with this one as the first: "
                f"{HOW.format(others=size - 1)}"
            )
        self._config = config
        self._address = address
        self._program = program
        self._job = JobFolder(_job_pid())
        self._rank: subprocess.Popen[bytes] | None = None
        """Rank 0, if this front started it."""
        self._launch: MpiLeaderLaunch | None = None

    def open(self) -> MpiLeaderLaunch:
        if self._job.is_in_launch():
            raise ConfigurationError(
                "the ranks of this MPI job serve a model already, and a job has one engine: unload that model first"
            )
        launch = Launch.of(Path(tempfile.mkdtemp(prefix="engine-")), self._config, OuterJob())
        launch.describe()
        try:
            if self._job.path.exists():
                self._post(launch)
            else:
                self._start_rank(launch)
        except BaseException:
            shutil.rmtree(launch.directory, ignore_errors=True)
            raise
        self._launch = MpiLeaderLaunch(launch, self._address)
        return self._launch

    def pids(self) -> list[int]:
        if self._rank is not None:
            self._rank.poll()  # a zombie is no running process
        return self._launch.pids() if self._launch is not None else []

    def end_spares(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing to do: every launch was opened, and rank 0 ends with the job."""

    def _post(self, launch: Launch) -> None:
        try:
            self._job.post(launch)
        except OSError:
            raise ConfigurationError(
                "the ranks of this MPI job have ended, and a job cannot get new ones: start mpiexec again"
            ) from None

    def _start_rank(self, launch: Launch) -> None:
        self._job.create()
        with self._job.open_mailbox() as mailbox:
            self._job.post(launch)
            inherited = [mailbox.fileno(), *(int(number) for number in (os.environ.get("PMI_FD"),) if number)]
            arguments = ["--mailbox", str(mailbox.fileno()), "--job", str(self._job.pid)]
            self._rank = subprocess.Popen(
                [str(find_python()), *self._program, *arguments],
                env=worker_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=inherited,
                start_new_session=True,
            )


class MpiLeaderLaunch:
    """Implements wire.launcher.RunningLaunch."""

    def __init__(self, launch: Launch, address: EngineAddress | None) -> None:
        self.socket_path: Path = launch.socket_path
        self._launch = launch
        self._address = address
        self._is_published = False
        self._pidfds: dict[int, int] = {}  # pid -> pidfd

    def pids(self) -> list[int]:
        """Of the ranks on this machine that still run."""
        return [pid for pid in self._launch.rank_pids() if Path("/proc", str(pid)).exists()]

    def fds(self) -> list[int]:
        for pid in self._launch.rank_pids():
            if pid not in self._pidfds:
                with contextlib.suppress(ProcessLookupError):
                    self._pidfds[pid] = os.pidfd_open(pid)
        return list(self._pidfds.values())

    @property
    def has_joined(self) -> bool:
        return bool(self._launch.rank_pids())

    def publish(self) -> None:
        self._is_published = True
        if self._address is not None:
            self._address.point_to(self.socket_path)

    def end_reason(self, ready_fds: Collection[object]) -> str:
        failure = "" if self._is_published else self._launch.failure()
        dead = [pid for pid, pidfd in self._pidfds.items() if pidfd in ready_fds]
        return failure or (f"rank process {dead[0]} has died, and its MPI job ends" if dead else "")

    @property
    def is_misconfigured(self) -> bool:
        return self._launch.is_misconfigured()

    def wait_for_end(self, seconds: float) -> bool:
        """See RunningLaunch: the ranks end this launch, and wait for the next one."""
        deadline = time.monotonic() + seconds
        while not has_ended(self._launch):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def end(self) -> None:
        """Remove the launch's files. Ranks that have not left it are killed, and with them the job."""
        if self._address is not None:
            self._address.withdraw(self.socket_path)
        if not has_ended(self._launch):
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        shutil.rmtree(self._launch.directory, ignore_errors=True)


def leads_mpi_job(num_ranks: int) -> bool:
    """Whether this process was started as rank 0 of an MPI job of so many processes."""
    job = find_outer_job(os.environ)
    return job is not None and job.is_mpi and job.rank == 0 and job.size == num_ranks


def _job_pid() -> int:
    """The process that `mpiexec` started: this one, or the furthest above it with the job's variables."""
    pid = os.getpid()
    while (above := _parent(pid)) > 1 and _is_in_job(above):
        pid = above
    return pid


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _is_in_job(pid: int) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(variable.partition(b"=")[0].decode(errors="replace") in MPI_RANKS for variable in variables)
