"""Reserves places in a Ray cluster for the ranks of one launch, starts an actor in each, and waits until a rank ends.

Actors and placement group belong to Ray's job of this process: Ray ends them when it ends, even if it is killed. So it
ends a cluster that was started here. Does not know how a cluster is found.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RuntimeEnvSetupError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from inflight.config import EngineConfig
from inflight.distributed.joining import Meeting
from inflight.distributed.sockets import MIN_SECRET
from inflight.errors import ConfigurationError
from inflight.executor.launchers.ray_rank import RayRank
from inflight.executor.wire.launch import LAUNCH, Launch
from inflight.free_port import free_port
from inflight.python_command import worker_environment

OBJECT_STORE_BYTES = 100 * 2**20
"""Of a cluster that is started here; next to nothing is put there, and Ray takes no less than 75 MiB."""
ROOM_SECONDS = 45.0
"""Time that Ray has to find places. Less than a front waits for ranks to join, so that it hears what is missing."""
NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `address`: of its machine, for the other ranks."""

    node_id: str
    address: str


class LostRank(Exception):
    """Why a launch has ended. `is_misconfigured`: another one would end in the same way."""

    def __init__(self, reason: str, *, is_misconfigured: bool = False) -> None:
        super().__init__(reason)
        self.is_misconfigured = is_misconfigured


def serve(launch: Launch, address: str | None) -> None:
    """From the ranks' start to their end. `address`: of the cluster; None = one is started here. Raises
    ConfigurationError if Ray cannot start them, else LostRank."""
    config = launch.config
    try:
        if address is None:
            _start_cluster(launch)
        else:
            ray.init(address=address, logging_level="WARNING")
    except (OSError, RuntimeError, ValueError) as error:
        failed = f"the Ray cluster {address} cannot be joined" if address else "Ray did not start on this machine"
        raise ConfigurationError(f"{failed}: {_first_line(error)}") from None
    resources = _resources(config)
    if address is None and "GPU" in resources and config.data_parallel_size > 1:
        raise ConfigurationError(
            "replicas on GPUs need one Ray cluster, which knows what each of them has: run `ray start --head`"
        )
    group = _reserve(config, resources)
    places = _places(group)
    meeting = msgspec.json.encode(_appoint(places)).decode()
    make_actor = ray.remote(RayRank)
    ranks = {}
    for rank, place in enumerate(places):
        actor = make_actor.options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            runtime_env=_runtime_environment(config),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        ).remote()
        # The actor lives as long as somebody refers to it.
        ranks[actor.serve.remote(os.environ[LAUNCH], rank, meeting, place.address)] = (actor, rank)
    while ranks:
        (ended,), _ = ray.wait(list(ranks))
        _, rank = ranks.pop(ended)
        _check_end(ended, rank, places[rank])


def _start_cluster(launch: Launch) -> None:
    """One of this machine alone, for this launch alone, with places for all of its ranks."""
    config = launch.config
    # The longest address of a socket is short, and Ray's begin with this folder.
    folder = f"/proc/{os.getpid()}/fd/{os.open(launch.directory, os.O_PATH)}"
    num_cpus = max(os.cpu_count() or 1, config.num_replica_ranks * (config.num_threads or 1))
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level="WARNING",
        _temp_dir=folder,
    )


def _resources(config: EngineConfig) -> dict[str, float]:
    """What Ray reserves for a rank: its threads, and a GPU if it is to use one."""
    uses_gpu = config.device == "cuda" or (config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    return {"CPU": config.num_threads or 1, **({"GPU": 1} if uses_gpu else {})}


def _reserve(config: EngineConfig, resources: dict[str, float]) -> PlacementGroup:
    """A place for each rank, that of rank 0 on this machine. Raises ConfigurationError if there is no room in time."""
    size = config.num_replica_ranks
    here = ray.get_runtime_context().get_node_id()
    group = placement_group(
        [resources] * size,
        strategy=config.ray_placement.upper(),
        bundle_label_selector=[{NODE_ID: here}, *({} for _ in range(size - 1))],
    )
    if not group.wait(ROOM_SECONDS):
        wanted = " and ".join(f"{number:g} {name}" for name, number in resources.items())
        raise ConfigurationError(
            f"the Ray cluster has no room for {size} ranks of {wanted} each, the first of them on this machine: add "
            "nodes to it, or end what else runs there"
        )
    return group


def _places(group: PlacementGroup) -> list[Place]:
    """Of each rank. On the front's node alone they need no network."""
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    if len(set(nodes.values())) == 1:
        addresses = dict.fromkeys(addresses, LOOPBACK)
    return [Place(nodes[rank], addresses[nodes[rank]]) for rank in sorted(nodes)]


def _appoint(places: list[Place]) -> Meeting:
    """How the ranks of these places are to meet."""
    if len({place.node_id for place in places}) == 1:
        return Meeting()
    address = places[0].address
    return Meeting(endpoint=f"tcp://{address}:{free_port(address)}", secret=secrets.token_hex(MIN_SECRET))


def _runtime_environment(config: EngineConfig) -> dict[str, Any]:
    """What `ray_runtime_env` says, with our packages on the import path."""
    given = json.loads(config.ray_runtime_env or "{}")
    variables = given.get("env_vars", {})
    import_path = worker_environment({"PYTHONPATH": variables.get("PYTHONPATH", "")})
    return {**given, "env_vars": {**variables, **import_path}}


def _check_end(ended: ray.ObjectRef, rank: int, place: Place) -> None:
    """Raises LostRank unless the rank has ended in order."""
    try:
        reason, is_misconfigured = ray.get(ended)
    except RayError as error:
        raise LostRank(
            f"rank {rank} on {place.address} is lost: {_first_line(error)}",
            is_misconfigured=isinstance(error, RuntimeEnvSetupError),
        ) from None
    if reason:
        raise LostRank(reason, is_misconfigured=is_misconfigured)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
