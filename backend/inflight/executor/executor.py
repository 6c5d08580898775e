"""The way in: an Executor launches an engine's ranks as its configuration says, and is their front.

    with Executor("path/to/checkpoint", EngineConfig(max_batch_size=8)) as executor:
        request_id = executor.enqueue_request(Request(input_token_ids=[1, 2, 3], max_tokens=16))
        (response,) = executor.await_responses(request_id)

What it can do stands in :class:`inflight.executor.front.front.Front`, which an engine inside this process
(`in_process.py`) and a front of somebody else's engine (`attach_executor`) share.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.front.remote import RemoteFront
from inflight.executor.launchers.attached import AttachedLauncher, find_engine
from inflight.executor.launchers.external import ExternalLauncher
from inflight.executor.launchers.fork_server import ForkServer, can_fork
from inflight.executor.launchers.mpi import Mpi
from inflight.executor.launchers.mpi_leader import MpiLeader, leads_mpi_job
from inflight.executor.launchers.multiproc import MultiProc
from inflight.executor.launchers.processes import LaunchCommand, ProcessLauncher
from inflight.executor.launchers.ray import Ray
from inflight.executor.launchers.spares import SpareLauncher
from inflight.executor.launchers.uniproc import UniProc
from inflight.executor.launchers.weight_holder import WeightHolder
from inflight.executor.wire.address import EngineAddress
from inflight.executor.wire.context_state import users_key_file
from inflight.executor.wire.launcher import Launcher
from inflight.gguf.folder import with_folders
from inflight.hub.local_checkpoint import local_checkpoint

KNOWN_TO_FRONTS = (
    "data_parallel_size",
    "context_replicas",
    "max_tokens_in_buffer",
    "tokens_per_block",
    "enable_kv_cache_reuse",
)
"""What every front of an engine must know of its configuration: by these requests are routed to replicas."""


class Executor(RemoteFront):
    """An engine of one's own, ready to serve once it is constructed, unless it `waits` for nothing: its ranks are
    processes that end with it."""

    def __init__(
        self,
        model_path: str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        *,
        name: str = "",
        keep_trying: bool = True,
        keeps_statistics: bool = True,
        on_engine_death: Callable[[str], None] | None = None,
        waits: bool = True,
    ) -> None:
        """Launch the ranks and wait until they have loaded the model.

        `model_path`: Hugging Face checkpoint folder, or the name of a model on the hub; None = what `config` names.
        `name`: the engine's name, by which other fronts find it; "" if no other front uses it. `waits`: if False, the
        ranks only begin to load, and `start` waits for them. For the other options see RemoteFront. Raises
        ConfigurationError with the reason that the ranks gave.
        """
        config = resolve_config(model_path, config)
        super().__init__(
            config,
            *make_launchers(config, name),
            name=name,
            keep_trying=keep_trying,
            keeps_statistics=keeps_statistics,
            on_engine_death=on_engine_death,
        )
        if waits:
            self.start()
        else:
            self.begin()


def attach_executor(
    config: EngineConfig,
    name: str,
    *,
    run_directory: str | os.PathLike[str] | None = None,
    on_engine_death: Callable[[str], None] | None = None,
) -> RemoteFront:
    """A front of an engine that another process of this user launched under `name`, as tritonserver does under the name
    of its model. It reconnects after that process relaunches the engine. Of `config` only the timeouts, the rings of
    statistics and KV cache events and the checkpoint's generation_config.json are used; how many replicas there are,
    for what, and what routes requests to them, the engine says, if it serves by now, else `config`. It is returned
    unstarted: use it as a context manager, or call `start`. `run_directory`: that of the engine's server, which
    `inflight serve` prints; None for an engine without that supervisor, or for a process of the same server. Raises
    ConfigurationError if the directory is not this user's alone."""
    directory = None if run_directory is None else Path(run_directory)
    try:
        engine = find_engine(EngineAddress.of(name, directory), 0.0)
    except ConfigurationError:
        engine = config
    config = dataclasses.replace(config, **{key: getattr(engine, key) for key in KNOWN_TO_FRONTS})
    addresses = [EngineAddress.of(name, directory, replica) for replica in range(config.data_parallel_size)]
    return RemoteFront(config, *map(AttachedLauncher, addresses), name=name, on_engine_death=on_engine_death)


def find_engine_config(name: str, seconds: float) -> EngineConfig:
    """The configuration of the engine that another process has launched under `name`, or launches within `seconds`.
    Raises ConfigurationError if there is none."""
    return find_engine(EngineAddress.of(name), seconds)


def resolve_config(model_path: str | os.PathLike[str] | None, config: EngineConfig | None) -> EngineConfig:
    """`config`, or the defaults, for the checkpoint in `model_path`, if that is given. A model that is named instead of
    a folder is fetched, and of a GGUF file a folder is made. Raises ConfigurationError."""
    config = config or EngineConfig()
    if model_path is not None:
        config = dataclasses.replace(config, gpt_model_path=os.fspath(model_path))
    told = config.to_parameters()
    path = str(local_checkpoint(config.gpt_model_path, told))
    own = {key: path for key in ("gpt_model_path", "tokenizer_dir") if told[key] == config.gpt_model_path}
    made = with_folders({**told, **own}, ".")
    return dataclasses.replace(
        config,
        gpt_model_path=made["gpt_model_path"],
        tokenizer_dir=made["tokenizer_dir"],
        speculative_model_dir=made["speculative_model_dir"],
    )


def make_launchers(config: EngineConfig, name: str = "") -> list[Launcher]:
    """What starts the ranks of each replica, or finds them, in the way that `config.executor` names. `name`: the
    engine's, by which other fronts find it; "" = no other front uses it. Raises ConfigurationError."""
    weights = WeightHolder(config)
    return [
        make_launcher(config.of_replica(replica), name, replica, weights)
        for replica in range(config.data_parallel_size)
    ]


def make_launcher(
    config: EngineConfig, name: str = "", replica: int = 0, weights: WeightHolder | None = None
) -> Launcher:
    """The same of one replica, whose own part of the configuration this is. `weights`: what holds those of all
    replicas; None = it is the only one."""
    weights = weights or WeightHolder(config)
    address = EngineAddress.of(name, replica=replica) if name else None
    way = config.launcher
    if config.may_lead_mpi_job and leads_mpi_job(config.num_replica_ranks):
        way = "mpi_leader"
    if way == "external":
        if not name:
            raise ConfigurationError("executor external finds ranks by the engine's name: use attach_executor")
        return ExternalLauncher(config, name, address)
    if config.max_tokens_in_buffer and not config.kv_transfer_key_file:
        # Launched ranks have a folder for temporary files of their own, and would look for it there.
        config = dataclasses.replace(config, kv_transfer_key_file=str(users_key_file()))
    if way == "mpi_leader":
        return MpiLeader(config, address)
    commands: dict[str, Callable[[], LaunchCommand]] = {
        "uniproc": UniProc,
        "mpi": lambda: Mpi(config),
        "multiproc": lambda: MultiProc(config),
        "ray": lambda: Ray(config),
    }

    command = commands[way]()
    fork_server = ForkServer() if command.may_fork and can_fork(config) else None

    def make() -> Launcher:
        return ProcessLauncher(config, command, address, weights, fork_server)

    return SpareLauncher(config, make) if config.spare_ranks else make()
