"""How much of the host's memory is left to this process: of the machine, and of each control group that it is in.

A container's limit is a control group's. The system kills who goes beyond one, so it has to be known beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
NO_LIMIT = 2**63
_SPELLINGS = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Versions 2 and 1: files of the limit and of what is used, and what the names in memory.stat begin with."""


def available_memory() -> int:
    """Bytes. Files that the system keeps in memory count as available: it gives them up."""
    return min([_host_available(), *map(_cgroup_available, _cgroups())])


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups() -> Iterator[Path]:
    """Folders of this process's control groups and of those around them; what a container sees as the root is its own.
    Some may not exist."""
    try:
        lines = OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root = CGROUP / "memory" if controllers else CGROUP
            own = Path(path.strip("/"))
            yield from (root / around for around in (own, *own.parents))


def _cgroup_available(folder: Path) -> int:
    for limit, used, prefix in _SPELLINGS:
        try:
            left = int((folder / limit).read_text(encoding="ascii")) - int((folder / used).read_text(encoding="ascii"))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            return max(left + sum(int(counts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive")), 0)
        except (OSError, ValueError, KeyError):
            # Spelled otherwise, or "max".
            continue
    return NO_LIMIT
