"""Folders in which what takes seconds to make is kept between starts.

The kernels have the same function for what they keep: they know nothing of the engine, and to import theirs takes
torch, which the processes that read a GGUF file's metadata do without. A test holds the two together.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`name` in $INFLIGHT_CACHE_DIR, else in $XDG_CACHE_HOME/inflight, else in ~/.cache/inflight; private to its user.

    Raises OSError, also if others could have written what lies there.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("INFLIGHT_CACHE_DIR") or Path(base, "inflight"), name)
    if not folder.is_absolute():
        raise OSError("there is no home folder; set INFLIGHT_CACHE_DIR to a full path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} belongs to another user, or others may write to it; chmod 700 it")
    return folder
