"""The server's wall clock, which libfaketime moves where it is installed. Monotonic clocks stay as they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "faketime/libfaketimeMT.so.1"
PLACES = (Path(__file__).parents[2] / "build" / "libfaketime" / "usr" / "lib", Path("/usr/lib"), Path("/usr/lib64"))
OFFSET_FILE = "FAKETIME_TIMESTAMP_FILE"


def find_library() -> Path | None:
    return next((path for place in PLACES for path in [*place.glob(NAME), *place.glob(f"*/{NAME}")]), None)


@contextlib.contextmanager
def movable(folder: Path) -> Iterator[None]:
    """Processes that are started in this context can have their clock moved, if there is the library."""
    library = find_library()
    if library is None:
        yield
        return
    file = folder / "clock"
    file.write_text("+0")
    own = {
        "LD_PRELOAD": str(library),
        OFFSET_FILE: str(file),
        # The offset is read anew at each look at the clock.
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    os.environ |= own
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name)
        file.unlink()


def is_movable() -> bool:
    return OFFSET_FILE in os.environ


def move(offset: str) -> None:
    """`offset`: seconds from the true time, with its sign."""
    file = Path(os.environ[OFFSET_FILE])
    draft = file.with_suffix(".new")
    draft.write_text(offset)
    draft.replace(file)
