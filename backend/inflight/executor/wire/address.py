"""An engine's stable addresses, one for each replica: from the engine's name to the socket of a current launch.

The leader of every launch listens in that launch's own private directory. The address is a symbolic link with the
engine's name that points to the current socket. It lies in a directory that only this user may enter, one for each
number of a replica: in the server's run directory if there is one.
"""

from __future__ import annotations

import glob
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.run_directory import run_directory

ENGINES = "engines"
"""Folder of the symbolic links. Those of other replicas than the first lie in engines.1, engines.2 and so on: behind
the name a number could be part of another engine's name."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of one replica. No link exists before the first launch serves and between two launches."""

    link: Path

    @classmethod
    def of(cls, name: str, directory: Path | None = None, replica: int = 0) -> EngineAddress:
        """The address of a replica of the engine called `name`. `directory`: run directory of its server, or
        `user_directory()` for ranks without a server; None = this process's run directory, if it has one, else the
        user's. Raises ConfigurationError if no file can have that name, or if other users could write to the folder of
        links."""
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ConfigurationError(f"an engine cannot be called {name!r}: give a name without a slash")
        parent = directory or run_directory()
        folder = private(parent) if parent is not None else user_directory()
        return cls(private(folder / (f"{ENGINES}.{replica}" if replica else ENGINES)) / name)

    def of_all_replicas(self) -> list[EngineAddress]:
        """Those of the engine's replicas that serve now; this is the address of any of them."""
        found = sorted(self.link.parent.parent.glob(f"{ENGINES}*/{glob.escape(self.link.name)}"))
        return [EngineAddress(link) for link in found]

    def point_to(self, socket_path: Path) -> None:
        """From now on the engine is found at `socket_path`."""
        draft = self.link.with_name(f".{self.link.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(socket_path)
        draft.replace(self.link)

    def resolve(self) -> Path | None:
        """The socket of the current launch; None if there is none."""
        try:
            return self.link.readlink()
        except OSError:
            return None

    def withdraw(self, socket_path: Path) -> None:
        """Remove the link if it still points to `socket_path`; a link that another launch has set meanwhile stays."""
        if self.resolve() == socket_path:
            self.link.unlink(missing_ok=True)


def user_directory() -> Path:
    """The directory of this user's engines that belong to no server with a run directory. Raises ConfigurationError if
    it is not private."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return private(Path(base, f"inflight-{os.getuid()}"))


def private(folder: Path) -> Path:
    """This folder, which is made if it is missing. Raises ConfigurationError if it is not private to this user."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise ConfigurationError(f"{folder} cannot be made: there is no folder {folder.parent}") from None
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(f"{folder} must belong to this user alone: remove it, or set its mode to 0700")
    return folder
