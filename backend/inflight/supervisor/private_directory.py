"""The private folder of a server, and the words for a disk that has no room for it."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inflight.abandonment import Supervised
from inflight.errors import ConfigurationError
from inflight.supervisor.janitor import end_now

PREFIX = "inflight-"
"""Of the names of all such folders."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A new folder of mode 0700, which is removed when the context ends; if this process is killed, by the next one
    that looks (`adoption.find`). Raises ConfigurationError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        # If no folder is usable, tempdir is None, and the error lists those that were tried.
        raise ConfigurationError(_no_room(tempfile.tempdir, error)) from None
    try:
        with explained(folder):
            lock = Supervised(folder, end_now(folder, region_prefix(folder)))
        try:
            yield folder
        finally:
            lock.release()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def region_prefix(folder: Path) -> str:
    """Of the names of shared-memory regions that belong to a server with this private folder."""
    return f"inflight_{folder.name.removeprefix(PREFIX)}_"


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turns an OSError within the context, which fills the private `folder`, into a ConfigurationError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ConfigurationError(_no_room(folder.parent, error)) from None
        raise ConfigurationError(f"{error.filename or folder}: {error.strerror}") from None


def _no_room(folder: str | Path | None, error: OSError) -> str:
    where = f" in {folder}" if folder else ""
    return (
        f"the server's private folder cannot be made{where} ({error.strerror or error}): "
        "free some space there, or name another folder with TMPDIR"
    )
