"""A Ray cluster of this machine, and of a second one where there can be one.

with ray_cluster() as cluster:
    kill = cluster.add_far_node()
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import ray
from ray.cluster_utils import Cluster
from two_machines import Machine, second_machine, why_impossible

SOON_DEAD = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}
"""Ray notices within seconds that a node has died, whose port is closed then, and waits for one that is slow."""


class RayCluster:
    """Of a node with one CPU, to which the drivers on this machine connect, and others like it."""

    def __init__(self, other: Machine | None) -> None:
        """`other`: the second machine."""
        self._other = other
        self._far_nodes: list[subprocess.Popen[bytes]] = []
        self._cluster = Cluster()
        address = {} if other is None else {"node_ip_address": other.near_address}
        self._cluster.add_node(num_cpus=1, include_dashboard=False, _system_config=SOON_DEAD, **address)
        self.address: str = self._cluster.address
        self.host = self.address.rpartition(":")[0]

    def add_node(self) -> Callable[[], None]:
        """On this machine. Returns what kills it, as if a machine lost power: nothing of it ends in order."""
        node = self._cluster.add_node(num_cpus=1)
        return lambda: self._cluster.remove_node(node, allow_graceful=False)

    def add_far_node(self) -> Callable[[], None]:
        """The same on the second machine, if there is one. It need not have joined the cluster yet."""
        if self._other is None:
            return self.add_node()
        options = [f"--address={self.address}", f"--node-ip-address={self._other.address}", "--num-cpus=1", "--block"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        node = subprocess.Popen(
            [str(self._other.ssh_folder / "ssh"), self._other.address, *command],
            env={**os.environ, "TMPDIR": os.environ["RAY_TMPDIR"]},
        )
        self._far_nodes.append(node)
        return node.kill  # and with it all processes of the namespace

    def free_cpus(self) -> float:
        """That no placement group has reserved and no actor uses."""
        ray.init(address=self.address, logging_level="ERROR", log_to_driver=False)
        try:
            return float(ray.available_resources().get("CPU", 0.0))
        finally:
            ray.shutdown()

    def close(self) -> None:
        for node in self._far_nodes:
            node.kill()
            node.wait()
        self._cluster.shutdown()


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    folder = tempfile.mkdtemp(prefix="ray-")  # short enough for sockets' addresses
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = RayCluster(None if why_impossible() else stack.enter_context(second_machine()))
        try:
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder)
