"""Cleans up after a server, whichever of its processes died. It runs as a process of its own beside the supervisor.

    python -m inflight.supervisor.janitor RUN_DIRECTORY SHARED_MEMORY_PREFIX
                                                      (standard input: a pipe that the supervisor holds open)

The pipe closes when the supervisor ends, even by SIGKILL. Then the janitor ends every process of that server and
removes its shared memory and its directory. A normal stop uses it as well, so this code runs every time. Knows nothing
of how a server is started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from inflight.supervisor import processes, shared_memory

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL. No client waits for a response any more; ranks only need to leave MPI."""


def sweep(run_directory: Path, prefix: str, grace: float = GRACE, spared: Collection[int | None] = frozenset()) -> None:
    """End the server's processes but those `spared`, and remove its shared-memory regions; the directory stays."""
    processes.end(lambda: [pid for pid in processes.marked(run_directory) if pid not in spared], grace)
    shared_memory.remove(prefix)


@contextlib.contextmanager
def attending(run_directory: Path, prefix: str) -> Iterator[None]:
    """Run a janitor for as long as the context lasts. When the context ends, the janitor has cleaned up."""
    program = [sys.executable, "-m", "inflight.supervisor.janitor", str(run_directory), prefix]
    attendant = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        attendant.communicate()


def main(arguments: list[str]) -> int:
    run_directory, prefix = Path(arguments[0]), arguments[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    sweep(run_directory, prefix)
    shutil.rmtree(run_directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
