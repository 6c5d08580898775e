"""The options of `inflight serve`, and the endpoints that it reports once the server is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inflight.hub.model_name import ModelName
from inflight.openai_options import OpenAIOptions
from inflight.output_config import Pooled
from inflight.supervisor.served_model import ServedModel

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """The addresses of a running server, "host:port" each, "" for what it does not serve, and the name of its model."""

    grpc: str
    http: str
    metrics: str
    model: str
    run_directory: Path
    """The server's private directory; every process of the server carries it as INFLIGHT_RUN_DIR."""
    openai: str = ""
    """Of the OpenAI server."""
    pooled: Pooled = ""
    """What the model gives of a text if it writes none."""
    models: tuple[str, ...] = ()
    """The names of several models; `model` is the first."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `inflight serve`. Every field has the default of the command without options."""

    checkpoint: Path | ModelName | None = None
    """Hugging Face checkpoint folder that the model `llm` serves, or the name of a model on the hub; None = what its
    config.pbtxt names."""
    model_repository: Path | None = None
    """Model repository to serve; None = the repository that comes with inflight."""
    apis: tuple[str, ...] = ()
    """APIs whose dialect models are served beside the engine's own model: folders of `backend/apis`, or these with
    `-unary` behind, or one of several models' names and a colon before."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Engine parameters of the model `llm` that replace those in config.pbtxt, e.g. tensor_parallel_size -> "2"."""

    models: tuple[ServedModel, ...] = ()
    """Several models, each with an engine of its own, instead of `checkpoint`; `parameters` are those of all."""
    unload_after: float = 0.0
    """Seconds without a request after which a model that is loaded on demand is unloaded; 0 = never."""

    allow_tritonserver: bool = True
    """False: serve OpenAI's API alone, as `openai` says; its server then launches the ranks. No tritonserver is needed,
    and what these options say of one has no effect."""
    allow_http: bool = True
    """Serve HTTP in addition to gRPC."""
    grpc_address: str = LOOPBACK
    http_address: str = LOOPBACK
    metrics_address: str = LOOPBACK
    """Interfaces to listen on. Use others than loopback in closed networks only."""
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    """TCP ports; 0 = a free one, reported once the server is ready."""

    openai: OpenAIOptions | None = None
    """Serve OpenAI's API as well, in a process of its own. Its engine, parameters and time to drain are this
    server's."""

    open_apis: bool = False
    """Let every client load and unload models, register shared memory, and set logging and tracing, as tritonserver
    does by default. False: only clients with the API key can."""
    api_key_file: Path | None = None
    """File that holds the API key; None = a random key that only the supervisor has."""

    tritonserver: Path | None = None
    """tritonserver's binary; None = the installed wheel's, then NVIDIA's image's, then PATH's."""
    server_arguments: tuple[str, ...] = ()
    """Further options of tritonserver, handed on unchanged; see `server_arguments` for those that are refused."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to tritonserver's environment, and so to the ranks'."""

    ready_timeout: float = 900.0
    """Seconds after its start within which every model must be ready."""
    drain_timeout: float = 30.0
    """Seconds that requests in flight may take to finish after the first SIGTERM or SIGINT."""
    adopt_timeout: float = 60.0
    """Seconds that a server goes on whose supervisor was killed, so that the next one with the same configuration can
    adopt it. 0 = it ends with its supervisor."""
    canary_period: float = 30.0
    """Seconds without a sign of work after which a request of one token is sent to an engine. If there is neither a
    response nor another sign of work for as long again, the engine counts as hung. 0 = never."""
    verbose: bool = False
    """Show tritonserver's whole log instead of its errors only."""
    log_file: Path | None = None
    """File to which tritonserver's whole log is also written."""

    on_ready: Callable[[Endpoints], None] | None = None
    """Called in a daemon thread of its own once the server is ready for the first time."""
