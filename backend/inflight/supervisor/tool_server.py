"""What a tool needs that starts servers of one engine by itself, again and again, as Triton Model Analyzer does.

The tool chooses when a server starts and which configuration it loads. Afterwards nothing is left of any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.run_directory import RUN_DIRECTORY, UNLOADED
from inflight.supervisor import backend_directory, mpi, ports, repository
from inflight.supervisor.janitor_process import JanitorProcess
from inflight.supervisor.options import LOOPBACK, ServeOptions
from inflight.supervisor.plan import write_repository
from inflight.supervisor.private_directory import explained, private_directory, region_prefix
from inflight.supervisor.server_arguments import REGION_PREFIX

EXIT_TIMEOUT = 3
"""tritonserver's own exit timeout in seconds: Model Analyzer kills a server that takes more than 5."""


@dataclass(frozen=True, kw_only=True)
class ToolServer:
    """One of the servers that the tool starts."""

    tritonserver: Path
    flags: dict[str, str]
    """Its options without the leading dashes, but for repository and ports."""
    environment: dict[str, str]
    repository: Path
    """Has one model; its version folder is empty, so that copies of the model cost nothing."""
    model: str
    parameters: dict[str, str]
    """The engine's, all of them, with full paths."""
    grpc: str
    http: str
    metrics: str
    """Addresses at which it shall listen, "host:port" each, free at the start."""

    def check(self, changes: dict[str, str]) -> None:
        """Raise ConfigurationError if the engine cannot have these parameters."""
        EngineConfig.from_parameters(self.parameters | changes, str(self.repository / self.model / "1"))


@contextlib.contextmanager
def prepare(options: ServeOptions, tell: Callable[[str], None]) -> Iterator[ToolServer]:
    """Lay out everything that the options of a server say about engine, checkpoint and binary. `tell`: of a model that
    is fetched. When the context ends,
    no process of any server is left, nor its shared memory. Raises ConfigurationError."""
    with private_directory() as directory:
        prefix = region_prefix(directory)
        with explained(directory):
            server = _lay_out(options, directory, prefix, tell)
        with JanitorProcess(directory, prefix).attending():
            yield server


def _lay_out(options: ServeOptions, directory: Path, prefix: str, tell: Callable[[str], None]) -> ToolServer:
    backends = backend_directory.lay_out(directory / "backend", options.tritonserver)
    served = write_repository(options, directory / "models", tell)
    if served.config is None:
        raise ConfigurationError(f"{options.model_repository} has no model of backend {repository.BACKEND}")
    if served.config.num_replica_ranks > 1 and served.config.launcher == "mpi":
        mpi.check_mpi(one_host=not served.config.mpi_hostfile)
    parameters = repository.anywhere(served.config)
    repository.write_bare_model(served.path / served.engine, directory / "bare" / served.engine, parameters)
    (directory / UNLOADED).mkdir()
    chosen = ports.claim({purpose: (LOOPBACK, 0) for purpose in ("HTTP", "gRPC", "metrics")})
    return ToolServer(
        tritonserver=backends.tritonserver,
        flags={
            "backend-directory": str(backends.backends),
            "backend-config": f"python,{REGION_PREFIX}={prefix}",
            "exit-timeout-secs": str(EXIT_TIMEOUT),
            "http-address": LOOPBACK,
            "grpc-address": LOOPBACK,
            "metrics-address": LOOPBACK,
        },
        environment={**backends.environment, RUN_DIRECTORY: str(directory)},
        repository=directory / "bare",
        model=served.engine,
        parameters=parameters,
        grpc=f"{LOOPBACK}:{chosen['gRPC']}",
        http=f"{LOOPBACK}:{chosen['HTTP']}",
        metrics=f"{LOOPBACK}:{chosen['metrics']}",
    )
