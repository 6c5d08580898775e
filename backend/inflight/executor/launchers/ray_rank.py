"""The actor of one rank: starts the rank as a child process on the machine that Ray has chosen, and waits for its end.

A process of its own keeps the rank's threads and devices apart from Ray's, and is killed with the actor. Between driver
and actor go strings and numbers alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inflight.distributed.host_address import INTERFACE, interface_of
from inflight.distributed.joining import MEETING
from inflight.executor.wire.launch import LAUNCH, RANK, Launch
from inflight.python_command import WORKER, find_python, worker_environment

INTERFACES = (INTERFACE, "NCCL_SOCKET_IFNAME")


class RayRank:
    """One rank, once."""

    def serve(self, launch: str, rank: int, meeting: str, address: str) -> tuple[str, bool]:
        """Run the rank to its end. Returns why it has failed, "" if it has not, and whether another launch would fail
        in the same way.

        `launch`, `meeting`: values of the variables LAUNCH and MEETING. `address`: of this machine, by whose interface
        tensors travel, unless the environment names another one.
        """
        with _at_home(Launch.from_text(launch)) as local:
            interface = interface_of(address)
            process = subprocess.Popen(
                [str(find_python()), *WORKER],
                env={
                    **(dict.fromkeys(INTERFACES, interface) if interface else {}),
                    **worker_environment(os.environ),
                    LAUNCH: local.to_environment(),
                    RANK: str(rank),
                    MEETING: meeting,
                    "TMPDIR": local.directory,
                },
                stdin=subprocess.DEVNULL,
            )
            code = process.wait()
            if code == 0:
                return "", False
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return local.failure() or f"rank {rank} on {address} {how}", local.is_misconfigured()


@contextlib.contextmanager
def _at_home(launch: Launch) -> Iterator[Launch]:
    """The launch as a rank on this machine sees it. On another machine than the front's this process takes the front's
    place, with a private directory in place of the launch's."""
    if launch.on_fronts_host and Path(launch.directory).exists():
        yield launch
        return
    directory = tempfile.mkdtemp(prefix="rank-")
    try:
        yield msgspec.structs.replace(
            launch, directory=directory, front_pid=os.getpid(), front_host=socket.gethostname()
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
