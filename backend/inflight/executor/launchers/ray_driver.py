"""`python -m inflight.executor.launchers.ray_driver`: has Ray serve one launch, and ends when a rank does, noting why.

A child of the front, with which it dies. It finds the cluster, or has one started on this machine, which ends with this
process: Ray's processes are its children, and the kernel kills them if it is killed.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.executor.wire.launch import Launch
from inflight.parent_watch import die_with_parent

CONNECT_SECONDS = 5.0
LOCAL = "local"
"""In place of the address of a cluster: one that is started on this machine."""
ON_LOOPBACK = {
    # Ray's name for: is this node to be reached from others? Without, it listens on 127.0.0.1 alone. It is read when
    # Ray is imported, by all of its processes.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # It tells nobody outside of it, either.
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment of a cluster that is started here."""


def main() -> int:
    """Returns the exit code."""
    launch = Launch.from_environment()
    die_with_parent(launch.front_pid)
    try:
        address = find_cluster(launch.config.ray_address)
        if address is None:
            os.environ.update(ON_LOOPBACK)
        from inflight.executor.launchers.ray_ranks import LostRank, serve

        try:
            serve(launch, address)
        except LostRank as error:
            launch.note_failure(str(error), is_misconfigured=error.is_misconfigured)
            return 1
    except ConfigurationError as error:
        launch.note_failure(str(error))
        return 1
    return 0


def find_cluster(named: str) -> str | None:
    """The address of the cluster that `named`, the configuration's ray_address, means; None = one is to be started.
    Raises ConfigurationError if one that is named does not answer."""
    told = os.environ.pop("RAY_ADDRESS", "auto")  # Ray would prefer it to the configuration
    address = told if named == "auto" else named
    if address == LOCAL:
        return None
    try:
        return _reached(_noted_cluster() if address == "auto" else address)
    except (OSError, ValueError) as error:
        if address == "auto":
            return None
        raise ConfigurationError(
            f"no Ray cluster answers at ray_address {address}: run `ray start --head` there, or set it to local and "
            f"one is started on this machine ({error})"
        ) from None


def _reached(address: str) -> str:
    """The address, if something listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    return address


def _noted_cluster() -> str:
    """The address that `ray start` has noted on this machine. That of another user does not count, who could note
    any. Raises OSError."""
    note = Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster")
    if note.stat().st_uid != os.getuid():
        raise PermissionError(f"{note} is another user's")
    return note.read_text()


if __name__ == "__main__":
    sys.exit(main())
