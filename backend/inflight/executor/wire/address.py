"""An engine's stable address: where the ranks of the engine of this name are found, whichever launch of them lives.

Every launch listens in a private directory of its own. The address is a link of the engine's name to the present one,
in a directory that only this user may enter: the server's run directory where there is one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.run_directory import run_directory

ENGINES = "engines"
"""Folder of the links, in the run directory."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of one engine. It may lead nowhere: before the first launch and between two."""

    link: Path

    @classmethod
    def of(cls, name: str) -> EngineAddress:
        """The engine called `name`. Raises ConfigurationError for a name that no file can have, or a place that others
        could write to."""
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ConfigurationError(f"an engine cannot be called {name!r}: give a name without a slash")
        return cls(_private_directory() / name)

    def point_to(self, socket_path: Path) -> None:
        """From now on the engine is found at `socket_path`."""
        draft = self.link.with_name(f".{self.link.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(socket_path)
        draft.replace(self.link)

    def resolve(self) -> Path | None:
        """The socket of the launch that lives now; None while there is none."""
        try:
            return self.link.readlink()
        except OSError:
            return None

    def withdraw(self, socket_path: Path) -> None:
        """`socket_path` is no more. A link that another launch has set meanwhile stays."""
        if self.resolve() == socket_path:
            self.link.unlink(missing_ok=True)


def _private_directory() -> Path:
    """Where the links are, made where it is missing."""
    parent = run_directory()
    if parent is None:
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        parent = Path(base, f"inflight-{os.getuid()}")
    directory = parent / ENGINES
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (parent, directory):
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigurationError(f"{folder} must belong to this user alone: remove it, or set its mode to 0700")
    return directory
