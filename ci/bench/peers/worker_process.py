"""An engine's process: how it is asked, and what else ran on the machine meanwhile."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ci.bench.line_process import LineProcess
from ci.bench.workload import Job


@dataclass(frozen=True, slots=True)
class Answer:
    first: float
    """Seconds until the first token of all jobs."""
    last: float
    """Seconds until the last."""
    num_tokens: int
    foreign: float
    """The share of all cores that others used meanwhile."""


class WorkerProcess:
    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: added to this process's environment. Its stderr goes to the file `log`. Does not wait until the
        engine is loaded."""
        with log.open("w") as errors:
            self._process = LineProcess(command, os.environ | dict(variables or {}), errors)

    def await_ready(self) -> None:
        """Raises RuntimeError where the process ends instead."""
        self._process.read()

    def ask(self, jobs: Sequence[Job]) -> Answer:
        """Run `jobs`, several at a time. Raises RuntimeError if the process ends or gives other than all tokens."""
        before, busy, start = self._own_seconds(), busy_seconds(), time.perf_counter()
        answer = self._process.ask({"jobs": [[job.prompt, job.max_tokens] for job in jobs]})
        seconds = time.perf_counter() - start
        share = foreign_share(busy_seconds() - busy, self._own_seconds() - before, seconds, os.cpu_count() or 1)
        wanted = sum(job.max_tokens for job in jobs)
        if answer["num_tokens"] != wanted:
            raise RuntimeError(f"{answer['num_tokens']} tokens came where {wanted} were asked for")
        return Answer(answer["first"], answer["last"], wanted, share)

    def close(self) -> None:
        self._process.close()

    def _own_seconds(self) -> float:
        """CPU time of the process, of those that it started, and of this one, which writes and reads lines."""
        root = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (root, *root.children(recursive=True), psutil.Process())]
        return float(sum(each.user + each.system for each in times))


def busy_seconds() -> float:
    """CPU time of everything on this machine since it started, and of its host's other guests where that is told."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def foreign_share(busy: float, own: float, seconds: float, num_cores: int) -> float:
    """The share of `num_cores` cores in `seconds` that was used (`busy`) by others than one's own, in CPU seconds."""
    return max(0.0, busy - own) / (seconds * num_cores)


def worker_path(is_own: bool) -> str:
    """PYTHONPATH of a worker: this engine's packages for its own, nothing for those in other environments."""
    return os.pathsep.join(filter(None, sys.path)) if is_own else ""
