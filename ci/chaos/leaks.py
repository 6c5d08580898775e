"""What a server must not keep: memory that grows while it serves, and anything at all when it has ended."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median

from ci.chaos.scene import TRITONSERVER, Scene
from inflight.supervisor import processes

MiB = 1 << 20
MIN_SECONDS = 120.0
"""For which a process must have lived under faults before its growth says anything."""
MAX_GROWTH = 0.05, 24 * MiB
"""Of the second half of a process's life: part of its memory, and bytes; more than both is a leak."""
WARM_UP = 0.4
"""Part of a life."""
LOOK_SECONDS = 60.0
"""Between two looks at proportional bytes, for which the kernel walks through all pages."""
MAX_NEW_DESCRIPTORS = 24
"""Streams come and go, and each may hold some."""
REPORTED_ONLY = frozenset({TRITONSERVER})
"""tritonserver keeps the pools of the largest load that it had."""


@dataclass
class Life:
    """Resident bytes and open descriptors of one process at rest or under load, over time."""

    role: str
    times: list[float] = field(default_factory=list)
    bytes_: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    looks: list[tuple[float, int, int]] = field(default_factory=list)
    """Now and then: the time, resident and proportional bytes (each shared page by the number of its processes)."""

    @property
    def rate(self) -> float:
        """Bytes a minute, by least squares over all but its warming up."""
        first = int(len(self.times) * WARM_UP)
        return 60 * linear_regression(self.times[first:], self.bytes_[first:]).slope

    @property
    def growth(self) -> tuple[int, int]:
        """Bytes in the middle of its life, and those added by its end."""
        return _middle_and_added(self.bytes_)

    @property
    def new_descriptors(self) -> int:
        """Between the same times."""
        return _middle_and_added(self.descriptors)[1]


def _middle_and_added(values: list[int]) -> tuple[int, int]:
    """Medians of fifths of a life."""
    fifth = max(len(values) // 5, 1)
    middle, end = median(values[2 * fifth : 3 * fifth]), median(values[-fifth:])
    return int(middle), int(end - middle)


class Growth:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._lives: dict[int, Life] = {}

    def sample(self) -> None:
        supervisor = self._scene.server.process
        assert supervisor is not None
        for role, pid in {**self._scene.roles(), "the supervisor": supervisor.pid}.items():
            with contextlib.suppress(OSError, IndexError):
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                life = self._lives.setdefault(pid, Life(role))
                life.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
                life.times.append(time.monotonic())
                life.bytes_.append(resident)
                if not life.looks or life.times[-1] - life.looks[-1][0] >= LOOK_SECONDS:
                    life.looks.append((life.times[-1], resident, _proportional_bytes(pid)))

    def lives(self) -> list[Life]:
        """Those that were long enough."""
        return [life for life in self._lives.values() if life.times[-1] - life.times[0] >= MIN_SECONDS]

    def complaints(self) -> list[str]:
        found = []
        for life in self.lives():
            before, added = life.growth
            if life.role not in REPORTED_ONLY and added > max(MAX_GROWTH[0] * before, MAX_GROWTH[1]):
                found.append(f"{life.role} grew from {before // MiB} to {(before + added) // MiB} MiB")
            if life.new_descriptors > MAX_NEW_DESCRIPTORS:
                found.append(f"{life.role} has {life.new_descriptors} descriptors more than before")
        return found


def _proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def left_behind(scene: Scene) -> list[str]:
    """Of a server that has ended: processes, sockets, shared memory and files, in words."""
    found = [f"process {pid}" for pid in processes.marked(scene.endpoints.run_directory)]
    addresses = (scene.endpoints.grpc, scene.endpoints.http, scene.endpoints.metrics, scene.endpoints.openai)
    for address in addresses:
        host, _, port = address.partition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            found.append(f"somebody listens at {address}")
    found += [f"shared memory {path}" for path in scene.server.shared_memory]
    if scene.endpoints.run_directory.exists():
        found.append(f"the run directory {scene.endpoints.run_directory}")
    return found + [f"the file {path}" for path in scene.sandbox.leftovers()]
