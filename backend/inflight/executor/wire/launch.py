"""What a front passes to the ranks that it launches, and the notes that they leave for it.

It is passed in one environment variable, which every process of the launch inherits. Its value is unique to the launch,
so it also identifies those processes later, whatever their parents and sessions are by then. A second variable holds
the number of a rank, where each has a command of its own. Notes are files in the launch's private directory: which
processes are ranks, and why one of them failed. The front leaves one too: what it passed to the ranks, for other
fronts.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inflight.config import EngineConfig
from inflight.distributed.joining import Joining

LAUNCH = "INFLIGHT_LAUNCH"
RANK = "INFLIGHT_RANK"

SOCKET = "engine.sock"
DESCRIPTION = "launch.json"
FAILURE = "failure"
RANK_NOTE = "rank."


class _Failure(msgspec.Struct, frozen=True):
    """Why a rank failed."""

    reason: str
    is_misconfigured: bool = False
    is_of_weights: bool = False


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a replica's ranks."""

    directory: str
    """Private (mode 0700) and created for this launch alone."""
    front_pid: int
    front_host: str
    joining: Joining
    """How the ranks join each other."""
    parameters: dict[str, str]
    """EngineConfig.to_parameters()."""
    weights: list[str] = []
    """Of each rank: where the front holds memory for its weights (distributed.shared_memory.place_of); empty = none."""
    is_relaunch: bool = False
    """The replica's ranks have served before, from this front."""

    @classmethod
    def of(
        cls,
        directory: Path,
        config: EngineConfig,
        joining: Joining,
        *,
        weights: Sequence[str] = (),
        is_relaunch: bool = False,
    ) -> Launch:
        return cls(
            directory=str(directory),
            front_pid=os.getpid(),
            front_host=socket.gethostname(),
            joining=joining,
            parameters=config.to_parameters(),
            weights=[*weights],
            is_relaunch=is_relaunch,
        )

    @classmethod
    def from_environment(cls) -> Launch:
        """Raises KeyError if no front launched this process."""
        return cls.from_text(os.environ[LAUNCH])

    @classmethod
    def from_text(cls, text: str) -> Launch:
        """The inverse of to_environment."""
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def beside(cls, socket_path: Path) -> Launch | None:
        """The launch whose leader listens at `socket_path`; None if there is none any more. For fronts that did not
        launch it."""
        try:
            return msgspec.json.decode(socket_path.with_name(DESCRIPTION).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

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

    def describe(self) -> None:
        """Write the note that `beside` reads."""
        self._write(DESCRIPTION, self.to_environment())

    def note_rank(self, rank: int) -> None:
        """Note that this process is `rank` and has joined the other ranks."""
        if self.on_fronts_host:
            self._write(f"{RANK_NOTE}{rank}", str(os.getpid()))

    def note_failure(self, reason: str, *, is_misconfigured: bool = False, is_of_weights: bool = False) -> None:
        """Note why this rank fails. The first note is kept: later failures are mostly consequences of the first.
        `is_misconfigured`: another launch with this configuration would fail in the same way; `is_of_weights`: another
        one that finds the same `weights` would."""
        if self.on_fronts_host:
            with contextlib.suppress(FileExistsError):
                failure = _Failure(reason, is_misconfigured, is_of_weights)
                self._write(FAILURE, msgspec.json.encode(failure).decode())

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks on this machine that have joined the others."""
        return sorted(int(note.read_text()) for note in Path(self.directory).glob(f"{RANK_NOTE}*"))

    def failure(self) -> str:
        """Why the first rank failed that noted a reason; empty if none did."""
        return self._failure().reason

    def is_misconfigured(self) -> bool:
        """Whether that reason would end another launch as well."""
        return self._failure().is_misconfigured

    def has_unusable_weights(self) -> bool:
        """Whether that reason is what `weights` name."""
        return self._failure().is_of_weights

    def _failure(self) -> _Failure:
        try:
            return msgspec.json.decode(Path(self.directory, FAILURE).read_bytes(), type=_Failure)
        except FileNotFoundError:
            return _Failure("")

    def _write(self, name: str, text: str) -> None:
        """Create a note atomically. Raises FileExistsError if there is one of this name already."""
        draft = Path(self.directory, f".{os.getpid()}.{name}")
        draft.write_text(text)
        try:
            os.link(draft, Path(self.directory, name))
        finally:
            draft.unlink()


def launched_rank() -> int | None:
    """The number that this process's launcher gave it; None if the ranks' own job numbers them."""
    number = os.environ.get(RANK)
    return int(number) if number else None
