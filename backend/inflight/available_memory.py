"""How much host memory this process may still use: of the machine, and of each control group that it is in.

A container's memory limit is that of a control group. The system kills a process that exceeds it, so the limit must be
known before memory is allocated.
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
"""For control groups of version 2 and 1: the files with the limit and the usage, and the prefix of the names in
memory.stat."""


def available_memory() -> int:
    """Available bytes. The page cache of files counts as available, because the system can drop it."""
    return min([_host_available(), *map(_cgroup_available, _cgroups())])


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups() -> Iterator[Path]:
    """Folders of this process's control groups and of all their parents. In a container the root is the container's own
    group. Some of the folders may not exist."""
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
            # The other version, or no limit ("max").
            continue
    return NO_LIMIT
