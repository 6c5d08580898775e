"""What a front tells the ranks that it launches, and what they note down for it.

It travels in one environment variable, which every process of the launch inherits. Because it is different for each
launch, it is also the mark by which those processes are found again, whatever parents and sessions they have by then.
Notes are files in the launch's private directory: which processes are ranks, and why one could not start.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from inflight.config import EngineConfig

LAUNCH = "INFLIGHT_LAUNCH"

SOCKET = "engine.sock"
FAILURE = "failure"
RANK = "rank."


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of an engine's ranks."""

    directory: str
    """Private (0700) and made for this launch alone."""
    front_pid: int
    front_host: str
    parameters: dict[str, str]
    """EngineConfig.to_parameters()."""

    @classmethod
    def of(cls, directory: Path, config: EngineConfig) -> Launch:
        return cls(
            directory=str(directory),
            front_pid=os.getpid(),
            front_host=socket.gethostname(),
            parameters=config.to_parameters(),
        )

    @classmethod
    def from_environment(cls) -> Launch:
        """Raises KeyError where no front launched this process."""
        return msgspec.json.decode(os.environ[LAUNCH], type=cls)

    def to_environment(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def config(self) -> EngineConfig:
        return EngineConfig.from_parameters(self.parameters)

    @property
    def socket_path(self) -> Path:
        return Path(self.directory, SOCKET)

    @property
    def on_fronts_host(self) -> bool:
        return socket.gethostname() == self.front_host

    # -- notes of the ranks --------------------------------------------------------------------------------------------

    def note_rank(self, rank: int) -> None:
        """This process is `rank`, and the ranks have found each other."""
        if self.on_fronts_host:
            self._write(f"{RANK}{rank}", str(os.getpid()))

    def note_failure(self, reason: str) -> None:
        """Why this rank cannot go on: the first rank's reason is kept, the others mostly suffer from it."""
        if self.on_fronts_host:
            with contextlib.suppress(FileExistsError):
                self._write(FAILURE, reason)

    def rank_pids(self) -> list[int]:
        """Processes of the ranks on this machine, as far as they have met."""
        return sorted(int(note.read_text()) for note in Path(self.directory).glob(f"{RANK}*"))

    def failure(self) -> str:
        """Why a rank could not go on; empty if none has said so."""
        try:
            return Path(self.directory, FAILURE).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _write(self, name: str, text: str) -> None:
        """All at once, and only if nobody was faster."""
        draft = Path(self.directory, f".{os.getpid()}.{name}")
        draft.write_text(text)
        try:
            os.link(draft, Path(self.directory, name))
        finally:
            draft.unlink()
