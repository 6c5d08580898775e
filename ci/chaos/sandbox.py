"""A private corner of the machine, where the kernel permits it: /dev/shm and the folder of temporary files are small
file systems that only this process and its children see. So they can be filled up, and what is left in them is the
server's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
CLONE_NEWNS = 0x00020000
CACHES = frozenset({"torchinductor_root", f"torchinductor_{os.environ.get('USER', '')}"})
"""Of torch, for all programs of a user."""
SIZES = {"shared memory": "256m", "temporary files": "64m"}


@dataclass(frozen=True)
class Sandbox:
    """Where the server's files are."""

    temporary: Path
    """Holds the server's run directory and logs."""
    why_shared: str = ""
    """Why the machine's own file systems are used, which must not be filled up; "" = they are private."""

    @property
    def is_private(self) -> bool:
        return not self.why_shared

    def leftovers(self) -> list[str]:
        """Files that a server of this run left, once it has ended."""
        places = (self.temporary, SHARED_MEMORY) if self.is_private else (self.temporary,)
        return sorted(str(path) for place in places for path in place.iterdir() if path.name not in CACHES)


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    """To be entered before the program has a second thread."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    why = _own_mounts(folder)
    previous = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield Sandbox(folder, why)
    finally:
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if previous is not None:
            os.environ["TMPDIR"] = previous
        if not why:
            subprocess.run(["umount", "--lazy", folder], check=False)
        subprocess.run(["rm", "-rf", folder], check=False)


def _own_mounts(folder: Path) -> str:
    """Why there are none; "" if there are."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return f"no mount namespace of its own ({os.strerror(ctypes.get_errno())})"
    commands = [["mount", "--make-rprivate", "/"]]
    for place, size in zip((SHARED_MEMORY, folder), SIZES.values(), strict=True):
        commands.append(["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(place)])
    for command in commands:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            return f"no file systems of its own ({finished.stderr.strip()})"
    return ""
