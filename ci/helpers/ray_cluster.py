"""A Ray cluster of this machine, whose nodes stand for machines: each has a raylet and places for ranks of its own.

with ray_cluster() as cluster:
    second = cluster.add_node()
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

SOON_DEAD = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}
"""Ray notices within seconds that a node has died."""


class RayCluster:
    """Of a node with one CPU, to which the drivers on this machine connect, and others like it."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=1, include_dashboard=False, _system_config=SOON_DEAD)
        self.address: str = self._cluster.address
        self.host = self.address.rpartition(":")[0]

    def add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=1)

    def kill_node(self, node: Any) -> None:
        """As if its machine lost power: nothing of it ends in order."""
        self._cluster.remove_node(node, allow_graceful=False)

    def free_cpus(self) -> float:
        """That no placement group has reserved and no actor uses."""
        ray.init(address=self.address, logging_level="ERROR", log_to_driver=False)
        try:
            return float(ray.available_resources().get("CPU", 0.0))
        finally:
            ray.shutdown()

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    folder = tempfile.mkdtemp(prefix="ray-")  # short enough for sockets' addresses
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        cluster = RayCluster()
        try:
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder)
