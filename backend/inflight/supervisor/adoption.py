"""Finds the servers of this user on this machine that were started by this program, and those that need a supervisor.

A server that has lost its supervisor is supervised again by the next command with the same configuration. One of
another configuration, or with a supervisor, is named where it is in the way.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from inflight.abandonment import end_if_abandoned
from inflight.supervisor.janitor_process import JANITOR, SUPERVISOR
from inflight.supervisor.ports import PortTaken
from inflight.supervisor.private_directory import PREFIX
from inflight.supervisor.process_id import ProcessId
from inflight.supervisor.server_record import ServerRecord, pid_namespace


@dataclass(frozen=True)
class FoundServer:
    run_directory: Path
    record: ServerRecord

    @property
    def supervisor(self) -> int | None:
        """Its pid; None if it is gone."""
        return self._running(SUPERVISOR)

    @property
    def janitor(self) -> int | None:
        return self._running(JANITOR)

    @property
    def command(self) -> str:
        """That started it, in messages."""
        return "inflight serve" if self.record.command else "inflight openai"

    def _running(self, file: str) -> int | None:
        found = ProcessId.read(self.run_directory / file)
        return found.pid if found is not None and found.is_running else None


def find() -> list[FoundServer]:
    """All of them. What is left of one without supervisor and janitor, which were killed both, is removed, also if it
    is one of another container, or had not been started yet."""
    servers = []
    for run_directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if not _is_own(run_directory) or end_if_abandoned(run_directory):
            continue
        record = ServerRecord.read(run_directory)
        if record is not None and record.namespace == pid_namespace():
            servers.append(FoundServer(run_directory, record))
    return servers


def who_holds(taken: PortTaken, configuration: dict[str, str], servers: list[FoundServer]) -> str:
    """Which server has the port, and what can be done, in a sentence; "" if none of these has it."""
    for server in servers:
        if not any(address.endswith(f":{taken.port}") for address in server.record.endpoints.values()):
            continue
        held = f"{taken.listener} is taken by"
        if (supervisor := server.supervisor) is not None:
            return f"{held} the {server.command} of pid {supervisor}: stop that, or {taken.other_port}"
        if (janitor := server.janitor) is None:
            return ""  # nothing that could be done about this server is known
        if differing := server.record.differences(configuration):
            return (
                f"{held} a server whose {server.command} was killed, and which differs in {', '.join(differing)}: "
                f"repeat the command that started it to adopt it, or end it with kill {janitor}"
            )
        return f"{held} a server that is being ended: start again in a moment"
    return ""


def _is_own(folder: Path) -> bool:
    """Whether this user alone can have put something there. Everybody may make a folder with such a name."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
