"""Everything that is decided before a server starts: its directory, repository, ports, command and environment."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from msgspec import structs

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.hub.local_checkpoint import fetch_model
from inflight.hub.model_name import ModelName
from inflight.openai_options import OF_A_MODEL, ModelOptions, OpenAIOptions
from inflight.output_config import Pooled
from inflight.run_directory import RUN_DIRECTORY, UNLOADED
from inflight.supervisor import (
    adoption,
    apis,
    installation,
    mpi,
    output_pipe,
    ports,
    repository,
    server_arguments,
    server_record,
)
from inflight.supervisor.adoption import FoundServer
from inflight.supervisor.api_key import ApiKey
from inflight.supervisor.checkpoint import find_pooled
from inflight.supervisor.janitor_process import JanitorProcess
from inflight.supervisor.log_file import open_log
from inflight.supervisor.openai_process import OPTIONS_FILE
from inflight.supervisor.options import LOOPBACK, Endpoints, ServeOptions
from inflight.supervisor.output_pipe import OutputPipe
from inflight.supervisor.private_directory import explained, private_directory, region_prefix
from inflight.supervisor.repository import ServedRepository
from inflight.supervisor.served_model import ServedModel
from inflight.supervisor.server_record import ServerRecord
from inflight.supervisor.several_models import write_several

EXIT_TIMEOUT = 5
"""tritonserver's own exit timeout in seconds; requests have been drained before it starts."""

MODELS = "models"
"""Folder of the served repository in the run directory."""

EVERY_INTERFACE = {"0.0.0.0": LOOPBACK, "::": "::1"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is needed to start the server, for the first time and again."""

    options: ServeOptions
    run_directory: Path
    """Private, mode 0700; holds links, the repository's copy and the engine's sockets."""
    record: ServerRecord
    """How it is started, and what the next supervisor finds."""
    repository: ServedRepository
    environment: dict[str, str]
    """Of tritonserver."""
    own_environment: dict[str, str]
    """Of other processes of the server, which need none of tritonserver's libraries."""
    endpoints: Endpoints
    api_key: ApiKey
    janitor: JanitorProcess
    """Not started yet, unless the server is adopted."""
    is_adopted: bool
    """Whether the server runs already: an earlier supervisor had started it and was killed."""

    @property
    def name(self) -> str:
        """What is started, in messages."""
        return "tritonserver" if self.options.allow_tritonserver else "the OpenAI server"


@contextlib.contextmanager
def make_plan(options: ServeOptions, tell: Callable[[str], None]) -> Iterator[Plan]:
    """Check everything that can be checked before the start, and make the private directory, which is removed when the
    context ends; or find the server to adopt. `tell` is what the janitor's problems are reported to. Raises
    ConfigurationError."""
    with private_directory() as directory:
        with explained(directory):
            plan = _plan(options, directory, tell)
        if plan.is_adopted:
            shutil.rmtree(directory)  # a repository only to compare with
        yield plan


def _plan(options: ServeOptions, directory: Path, tell: Callable[[str], None]) -> Plan:
    server_arguments.check(options.server_arguments)
    if options.allow_tritonserver and any(model.is_on_demand for model in options.models):
        raise ConfigurationError("models are loaded on demand by inflight openai alone, not by tritonserver")
    pieces = installation.find(options.tritonserver) if options.allow_tritonserver else None
    has_open_apis = options.open_apis or pieces is None
    api_key = ApiKey.choose(open_apis=has_open_apis, file=options.api_key_file)
    _check_log_file(options.log_file)
    others = adoption.find()
    served = write_repository(options, directory / MODELS, tell, _pinned(others))
    configuration = server_record.describe(options, served, api_key)
    for server in others:
        if server.supervisor is None and not server.record.differences(configuration):
            plan = _plan_for(options, server, served, tell, is_adopted=True)
            if plan.janitor.adopt():
                return plan
    for config in _engine_configs(served):
        if config.num_replica_ranks > 1 and config.launcher == "mpi":
            mpi.check_mpi(one_host=not config.mpi_hostfile)
    listeners = _listeners(options)
    try:
        # `inflight openai` has one port.
        chosen = ports.claim(listeners, "--port" if pieces is None else ports.OPTION)
    except ports.PortTaken as taken:
        raise ConfigurationError(adoption.who_holds(taken, configuration, others) or str(taken)) from None
    prefix = region_prefix(directory)
    command: list[str] = []
    variables: dict[str, str] = {}
    if pieces is not None:
        backends, variables = pieces.lay_out(directory)
        (directory / UNLOADED).mkdir()
        OutputPipe(directory, output_pipe.TRITONSERVER).make()
        command = [
            str(pieces.tritonserver),
            *api_key.arguments,  # first, so that they have been read before the first line of the log
            *_arguments(backends, served, prefix),
            *_listening(options, chosen),
            *_tracing(options, served),
            *options.server_arguments,
        ]
    if options.openai is not None:
        OutputPipe(directory, output_pipe.OPENAI).make()
        _write_openai_options(options, options.openai, served, chosen["OpenAI"], directory / OPTIONS_FILE)
    record = ServerRecord(
        configuration=configuration,
        namespace=server_record.pid_namespace(),
        prefix=prefix,
        command=command,
        variables=variables,
        endpoints={purpose: _reached_at(address, chosen[purpose]) for purpose, (address, _) in listeners.items()},
        api_key=api_key.value,
        fetched=served.fetched,
    )
    return _plan_for(options, FoundServer(directory, record), served, tell, is_adopted=False)


def _plan_for(
    options: ServeOptions,
    server: FoundServer,
    served: ServedRepository,
    tell: Callable[[str], None],
    *,
    is_adopted: bool,
) -> Plan:
    """Of a server that has been written down. `served`: its repository, or one that is equal."""
    directory, record = server.run_directory, server.record
    mark = {RUN_DIRECTORY: str(directory)}
    return Plan(
        options=options,
        run_directory=directory,
        record=record,
        repository=replace(served, path=directory / MODELS),
        environment={**os.environ, **record.variables, **options.environment, **mark},
        own_environment={**os.environ, **options.environment, **mark},
        endpoints=Endpoints(
            grpc=record.endpoints.get("gRPC", ""),
            http=record.endpoints.get("HTTP", ""),
            metrics=record.endpoints.get("metrics", record.endpoints.get("OpenAI", "")),
            model=served.engine,
            run_directory=directory,
            openai=record.endpoints.get("OpenAI", ""),
            pooled="" if served.config is None else _pooled(served.config),
            models=tuple(served.configs),
        ),
        api_key=ApiKey(record.api_key),
        janitor=JanitorProcess(
            directory,
            record.prefix,
            adopt_timeout=options.adopt_timeout,
            log_file=options.log_file,
            tell=tell,
        ),
        is_adopted=is_adopted,
    )


def _listeners(options: ServeOptions) -> dict[str, tuple[str, int]]:
    """Purpose -> the interface and port that are wanted."""
    listeners = {}
    if options.allow_tritonserver:
        listeners["gRPC"] = (options.grpc_address, options.grpc_port)
        listeners["metrics"] = (options.metrics_address, options.metrics_port)
        if options.allow_http:
            listeners["HTTP"] = (options.http_address, options.http_port)
    if options.openai is not None:
        listeners["OpenAI"] = (options.openai.host, options.openai.port)
    return listeners


def _pinned(servers: Iterable[FoundServer]) -> dict[str, str]:
    """Models of the hub that servers without a supervisor serve: whoever adopts one means the files that it has, also
    if the hub has others by now, or is gone."""
    return {name: path for each in servers if each.supervisor is None for name, path in each.record.fetched.items()}


def write_repository(
    options: ServeOptions,
    folder: Path,
    tell: Callable[[str], None],
    pinned: Mapping[str, str] = MappingProxyType({}),
) -> ServedRepository:
    """Write the repository that the options ask for into the new `folder`. `tell`: of models that are fetched;
    `pinned`: name -> folder of those that are not asked for. Raises ConfigurationError."""

    def fetch(model: ModelName, parameters: Mapping[str, str]) -> Path:
        known = pinned.get(str(model))
        return Path(known) if known is not None and Path(known).exists() else fetch_model(model, parameters, tell)

    source, parameters = options.model_repository, dict(options.parameters)
    if source is None:
        source = installation.find_model_repository()
        if options.checkpoint is None:
            # An absolute path tells clients on this machine where the tokenizer is.
            parameters.setdefault("gpt_model_path", str(source / "llm" / "1" / "checkpoint"))
    names = [model.name for model in options.models]
    api_models = apis.choose(options.apis, installation.find_apis(), names) if options.apis else {}
    if options.models:
        return write_several(
            source, folder, options.models, parameters=options.parameters, api_models=api_models, fetch=fetch
        )
    return repository.write(
        source,
        folder,
        checkpoint_folder=options.checkpoint,
        parameters=parameters,
        api_models=api_models,
        fetch=fetch,
    )


def _write_openai_options(
    options: ServeOptions, openai: OpenAIOptions, served: ServedRepository, port: int, path: Path
) -> None:
    if served.config is None:
        raise ConfigurationError("the OpenAI server needs a model of backend inflight, and the repository has none")
    if options.models:
        openai = structs.replace(
            openai, models=_model_options(options.models, openai, served), unload_after_seconds=options.unload_after
        )
    structs.replace(
        openai,
        engine=served.engine,
        launches_ranks=not options.allow_tritonserver,
        parameters=repository.anywhere(served.config),  # that process does not start where this one does
        port=port,
        api_key_file=openai.api_key_file and str(Path(openai.api_key_file).resolve()),
        # What is not finished by then is told so before the supervisor's own deadline.
        drain_seconds=0.9 * options.drain_timeout,
    ).write(path)


def _model_options(
    models: Sequence[ServedModel], openai: OpenAIOptions, served: ServedRepository
) -> list[ModelOptions]:
    """Of each model, with its own settings. Raises ConfigurationError for names that two models have."""
    if openai.served_model_names:
        raise ConfigurationError(
            "served_model_names is of one of several models: set MODEL:served_model_names, with that model's name"
        )
    found = []
    for model in models:
        for key in model.settings:
            if key not in OF_A_MODEL:
                raise ConfigurationError(f"{key} is of the whole server, not of the model {model.name} alone")
        own = openai.with_settings(model.settings)
        names = own.served_model_names if "served_model_names" in model.settings else model.client_names
        found.append(
            ModelOptions(
                engine=model.name,
                parameters=repository.anywhere(served.configs[model.name]),
                served_model_names=names,
                chat_template_kwargs=own.chat_template_kwargs,
                embedding_pooling=own.embedding_pooling,
                tool_parser=own.tool_parser,
                reasoning_parser=own.reasoning_parser,
                pooled=_pooled(served.configs[model.name]),
                is_on_demand=model.is_on_demand,
            )
        )
    all_names = [name for each in found for name in each.served_model_names]
    twice = next((name for name in all_names if all_names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"two models are called {twice} for clients: set served_model_names of one of them")
    return found


def _pooled(config: EngineConfig) -> Pooled:
    return find_pooled(Path(config.gpt_model_path), config.score_tokens, config.tokenizer_dir)


def _engine_configs(served: ServedRepository) -> Iterable[EngineConfig]:
    return served.configs.values() or ([] if served.config is None else [served.config])


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
            open_log(path).close()
        except OSError as error:
            raise ConfigurationError(f"--log-file {path} cannot be written: {error.strerror}") from None
