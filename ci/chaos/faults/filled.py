"""A file system without room."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

CHUNK = bytes(1 << 20)


@contextlib.contextmanager
def filled(place: Path) -> Iterator[None]:
    """As long as the context lasts, not a byte more fits into the file system of this folder."""
    filler = place / "chaos-filler"
    try:
        with filler.open("wb", buffering=0) as file:
            size = len(CHUNK)
            while size:
                try:
                    file.write(CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
        yield
    finally:
        filler.unlink(missing_ok=True)
