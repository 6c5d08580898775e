"""Everything that is decided before a server starts: its directory, repository, ports, command and environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from inflight.errors import ConfigurationError
from inflight.openai_options import OpenAIOptions
from inflight.run_directory import RUN_DIRECTORY, UNLOADED
from inflight.supervisor import apis, installation, mpi, ports, repository, server_arguments
from inflight.supervisor.api_key import ApiKey
from inflight.supervisor.options import LOOPBACK, Endpoints, ServeOptions
from inflight.supervisor.private_directory import explained, private_directory
from inflight.supervisor.repository import ServedRepository

EXIT_TIMEOUT = 5
"""tritonserver's own exit timeout in seconds; requests have been drained before it starts."""

OPENAI_FILE = "openai.json"
"""In the run directory: the options of the OpenAI server."""

EVERY_INTERFACE = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is needed to start the server, for the first time and again."""

    options: ServeOptions
    run_directory: Path
    """Private, mode 0700; holds links, the repository's copy and the engine's sockets."""
    prefix: str
    """Prefix of the names of its shared-memory regions."""
    repository: ServedRepository
    command: tuple[str, ...]
    environment: dict[str, str]
    """Of tritonserver."""
    own_environment: dict[str, str]
    """Of other processes of the server, which need none of tritonserver's libraries."""
    endpoints: Endpoints
    api_key: ApiKey


@contextlib.contextmanager
def make_plan(options: ServeOptions) -> Iterator[Plan]:
    """Check everything that can be checked before the start, and make the private directory, which is removed when the
    context ends. Raises ConfigurationError."""
    with private_directory() as run_directory:
        with explained(run_directory):
            plan = _plan(options, run_directory)
        yield plan


def _plan(options: ServeOptions, run_directory: Path) -> Plan:
    server_arguments.check(options.server_arguments)
    pieces = installation.find(options.tritonserver)
    api_key = ApiKey.choose(open_apis=options.open_apis, file=options.api_key_file)
    _check_log_file(options.log_file)
    served = write_repository(options, run_directory / "models")
    if served.config is not None and served.config.num_replica_ranks > 1:
        mpi.check_mpi(one_host=not served.config.mpi_hostfile)
    listeners = {
        "HTTP": (options.http_address, options.http_port),
        "gRPC": (options.grpc_address, options.grpc_port),
        "metrics": (options.metrics_address, options.metrics_port),
    }
    if not options.allow_http:
        del listeners["HTTP"]
    if options.openai is not None:
        listeners["OpenAI"] = (options.openai.host, options.openai.port)
    chosen = ports.claim(listeners)
    addresses = {purpose: _reached_at(address, chosen[purpose]) for purpose, (address, _) in listeners.items()}
    backends, variables = pieces.lay_out(run_directory)
    prefix = f"inflight_{os.getpid()}_"
    (run_directory / UNLOADED).mkdir()
    if options.openai is not None:
        _write_openai_options(options, options.openai, served, chosen["OpenAI"], run_directory / OPENAI_FILE)
    return Plan(
        options=options,
        run_directory=run_directory,
        prefix=prefix,
        repository=served,
        command=(
            str(pieces.tritonserver),
            *api_key.arguments,  # first, so that they have been read before the first line of the log
            *_arguments(backends, served, prefix),
            *_listening(options, chosen),
            *_tracing(options, served),
            *options.server_arguments,
        ),
        environment={**os.environ, **variables, **options.environment, RUN_DIRECTORY: str(run_directory)},
        own_environment={**os.environ, **options.environment, RUN_DIRECTORY: str(run_directory)},
        endpoints=Endpoints(
            grpc=addresses["gRPC"],
            http=addresses.get("HTTP", ""),
            metrics=addresses["metrics"],
            model=served.engine,
            run_directory=run_directory,
            openai=addresses.get("OpenAI", ""),
        ),
        api_key=api_key,
    )


def write_repository(options: ServeOptions, folder: Path) -> ServedRepository:
    """Write the repository that the options ask for into the new `folder`. Raises ConfigurationError."""
    source, parameters = options.model_repository, dict(options.parameters)
    if source is None:
        source = installation.find_model_repository()
        if options.checkpoint is None:
            # An absolute path tells clients on this machine where the tokenizer is.
            parameters.setdefault("gpt_model_path", str(source / "llm" / "1" / "checkpoint"))
    return repository.write(
        source,
        folder,
        checkpoint_folder=options.checkpoint,
        parameters=parameters,
        api_models=apis.choose(options.apis, installation.find_apis()) if options.apis else None,
    )


def _write_openai_options(
    options: ServeOptions, openai: OpenAIOptions, served: ServedRepository, port: int, path: Path
) -> None:
    if served.config is None:
        raise ConfigurationError("the OpenAI server needs a model of backend inflight, and the repository has none")
    structs.replace(
        openai,
        engine=served.engine,
        parameters=repository.anywhere(served.config),  # that process does not start where this one does
        port=port,
        api_key_file=openai.api_key_file and str(Path(openai.api_key_file).resolve()),
        # What is not finished by then is told so before the supervisor's own deadline.
        drain_seconds=0.9 * options.drain_timeout,
    ).write(path)


def _arguments(backends: Path, served: ServedRepository, prefix: str) -> tuple[str, ...]:
    return (
        f"--model-repository={served.path}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in served.models),
        "--disable-auto-complete-config",
        f"--backend-directory={backends}",
        f"--backend-config=python,{server_arguments.REGION_PREFIX}={prefix}",
        f"--exit-timeout-secs={EXIT_TIMEOUT}",
    )


def _listening(options: ServeOptions, chosen: Mapping[str, int]) -> tuple[str, ...]:
    http = (
        (f"--http-address={options.http_address}", f"--http-port={chosen['HTTP']}")
        if options.allow_http
        else ("--allow-http=false",)
    )
    return (
        *http,
        f"--grpc-address={options.grpc_address}",
        f"--grpc-port={chosen['gRPC']}",
        f"--metrics-address={options.metrics_address}",
        f"--metrics-port={chosen['metrics']}",
    )


def _tracing(options: ServeOptions, served: ServedRepository) -> tuple[str, ...]:
    """tritonserver's own spans go where ours go, which are under them. An operator's settings count before these; one
    who sends traces elsewhere makes all of them."""
    endpoint = served.config.otlp_traces_endpoint if served.config is not None else ""
    given = server_arguments.trace_settings(options.server_arguments)
    if not endpoint or "mode" in given or any(name.startswith("triton,") for name in given):
        return ()
    settings = {"mode": "opentelemetry", "opentelemetry,url": endpoint, "level": "TIMESTAMPS", "rate": "1"}
    return tuple(f"--trace-config={name}={value}" for name, value in settings.items() if name not in given)


def _reached_at(address: str, port: int) -> str:
    """The address at which a client on this machine reaches it, "host:port"."""
    host = EVERY_INTERFACE.get(address, address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_log_file(path: Path | None) -> None:
    """Raise ConfigurationError if the file cannot be opened. A full disk is no error: it may have room later."""
    if path is not None:
        try:
            path.open("ab").close()
        except OSError as error:
            raise ConfigurationError(f"--log-file {path} cannot be written: {error.strerror}") from None
