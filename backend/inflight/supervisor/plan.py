"""Everything that is decided before a server starts: its directory, repository, ports, command and environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import installation, mpi, ports, repository
from inflight.supervisor.repository import ServedRepository
from inflight.supervisor.serve import LOOPBACK, Endpoints, ServeOptions

EXIT_TIMEOUT = 5
"""tritonserver's own limit in seconds; requests have been drained before it counts."""

EVERY_INTERFACE = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A server as it will be started, and started again."""

    options: ServeOptions
    run_directory: Path
    """Private, mode 0700; holds links, the repository's copy and the engine's sockets."""
    prefix: str
    """How the names of its shared-memory regions begin."""
    repository: ServedRepository
    command: tuple[str, ...]
    environment: dict[str, str]
    endpoints: Endpoints
    connect_host: str
    http_port: int


@contextlib.contextmanager
def make_plan(options: ServeOptions) -> Iterator[Plan]:
    """Check everything that can be checked beforehand. Raises ConfigurationError; the directory lives as long as the
    context."""
    run_directory = Path(tempfile.mkdtemp(prefix="inflight-"))
    try:
        yield _plan(options, run_directory)
    finally:
        shutil.rmtree(run_directory, ignore_errors=True)


def _plan(options: ServeOptions, run_directory: Path) -> Plan:
    pieces = installation.find(options.tritonserver)
    source = options.model_repository or installation.find_model_repository()
    served = repository.write(
        source, run_directory / "models", checkpoint_folder=options.checkpoint, parameters=options.parameters
    )
    if served.config is not None and served.config.tensor_parallel_size > 1:
        mpi.check_mpi(one_host=not served.config.mpi_hostfile)
    chosen = ports.claim(
        {
            "HTTP": (options.http_address, options.http_port),
            "gRPC": (options.grpc_address, options.grpc_port),
            "metrics": (options.metrics_address, options.metrics_port),
        }
    )
    backends, variables = pieces.lay_out(run_directory)
    prefix = f"inflight_{os.getpid()}_"
    host = EVERY_INTERFACE.get(options.http_address, options.http_address)
    return Plan(
        options=options,
        run_directory=run_directory,
        prefix=prefix,
        repository=served,
        command=_command(options, pieces.tritonserver, backends, served, chosen, prefix),
        environment={**os.environ, **variables, **options.environment, RUN_DIRECTORY: str(run_directory)},
        endpoints=Endpoints(
            grpc=f"{EVERY_INTERFACE.get(options.grpc_address, options.grpc_address)}:{chosen['gRPC']}",
            http=f"{host}:{chosen['HTTP']}",
            metrics=f"{EVERY_INTERFACE.get(options.metrics_address, options.metrics_address)}:{chosen['metrics']}",
            model=served.engine,
            run_directory=run_directory,
        ),
        connect_host=host,
        http_port=chosen["HTTP"],
    )


def _command(
    options: ServeOptions, binary: Path, backends: Path, served: ServedRepository, chosen: dict[str, int], prefix: str
) -> tuple[str, ...]:
    return (
        str(binary),
        f"--model-repository={served.path}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in served.models),
        "--disable-auto-complete-config",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        f"--exit-timeout-secs={EXIT_TIMEOUT}",
        f"--http-address={options.http_address}",
        f"--http-port={chosen['HTTP']}",
        f"--grpc-address={options.grpc_address}",
        f"--grpc-port={chosen['gRPC']}",
        f"--metrics-address={options.metrics_address}",
        f"--metrics-port={chosen['metrics']}",
        *options.server_arguments,
    )
