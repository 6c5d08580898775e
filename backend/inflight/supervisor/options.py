"""What `inflight serve` can be told, and what it tells once the server is ready. Not how either is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Where a running server answers. Addresses are "host:port"; `model` is the name to ask for."""

    grpc: str
    http: str
    """"" where HTTP is off."""
    metrics: str
    model: str
    run_directory: Path
    """The server's private directory; every process of the server carries it as INFLIGHT_RUN_DIR."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `inflight serve` can be told. Every field has the default of a bare `inflight serve`."""

    checkpoint: Path | None = None
    """Hugging Face checkpoint folder that the model `llm` serves; None = the one its repository names."""
    model_repository: Path | None = None
    """Model repository to serve; None = the repository that comes with inflight."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Engine parameters of the model `llm` that replace those in config.pbtxt, e.g. tensor_parallel_size -> "2"."""

    allow_http: bool = True
    """Answer HTTP beside gRPC."""
    grpc_address: str = LOOPBACK
    http_address: str = LOOPBACK
    metrics_address: str = LOOPBACK
    """Interfaces to listen on; anything but loopback is for closed networks only."""
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    """TCP ports; 0 = a free one, told once the server is ready."""

    open_apis: bool = False
    """Let everybody who reaches the server load and unload models, register shared memory, and set logging and traces,
    as a tritonserver started by itself does. Otherwise that takes the API key."""
    api_key_file: Path | None = None
    """File that holds the API key; None = a random key that only the supervisor has."""

    tritonserver: Path | None = None
    """tritonserver's binary; None = the installed wheel's, then NVIDIA's image's, then PATH's."""
    server_arguments: tuple[str, ...] = ()
    """Further arguments handed to tritonserver as they are."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to tritonserver's environment, and so to the ranks'."""

    ready_timeout: float = 900.0
    """Seconds until every model must be ready."""
    drain_timeout: float = 30.0
    """Seconds that open requests may still take after the first SIGTERM or SIGINT."""
    canary_period: float = 30.0
    """Seconds without a sign of work after which an engine is sent a request of one token. If that stays without an
    answer, and without any sign of work, for as long again, the engine counts as hung. 0 = never."""
    verbose: bool = False
    """Show tritonserver's whole log instead of its errors alone."""
    log_file: Path | None = None
    """Write tritonserver's whole log there as well."""

    on_ready: Callable[[Endpoints], None] | None = None
    """Called in a daemon thread of its own once the server is ready for the first time."""
