"""Options that the operator hands on to tritonserver: which of them would take from the supervisor what it relies on.

It chooses ports, repository, backends and key, loads models itself, reads the log, and decides by exit code and
readiness. Options for that are refused with the name of ours. All others go on unchanged, and tritonserver refuses what
it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from inflight.errors import ConfigurationError

_REPOSITORY = "use --model-repository of inflight serve, before the --"
_LISTENS = "use --host, --http-port, --grpc-port and --metrics-port of inflight serve, before the --"
_PLAIN = "the supervisor talks to it in clear; put a proxy that speaks TLS before the server"
_LOADS = (
    "the supervisor loads all models of the repository; --open-apis or --api-key-file lets a client load and unload"
)
_KEY = "use --api-key-file or --open-apis of inflight serve, before the --"
_READS = "the supervisor reads its log; use --verbose or --log-file of inflight serve, before the --"
_READY = "the supervisor decides by it whether the server has started; --ready-timeout says how long that may take"
_NO_KEY = "its requests would pass by the API key"
_SET = "it is set already: models say all that they need in their config.pbtxt"

OWNED = {
    "model-repository": _REPOSITORY,
    "model-store": _REPOSITORY,
    "backend-directory": "it has inflight's backend; a tritonserver of your own can start with inflight backend-dir",
    "http-address": _LISTENS,
    "http-port": _LISTENS,
    "reuse-http-port": _LISTENS,
    "allow-http": "use --no-http of inflight serve, before the --",
    "grpc-address": _LISTENS,
    "grpc-port": _LISTENS,
    "reuse-grpc-port": _LISTENS,
    "allow-grpc": "the supervisor talks to it over gRPC",
    "grpc-use-ssl": _PLAIN,
    "grpc-use-ssl-mutual": _PLAIN,
    "metrics-address": _LISTENS,
    "metrics-port": _LISTENS,
    "allow-metrics": "the supervisor reads from them whether the engine works",
    "allow-sagemaker": _NO_KEY,
    "allow-vertex-ai": _NO_KEY,
    "http-restricted-api": _KEY,
    "grpc-restricted-protocol": _KEY,
    "model-control-mode": _LOADS,
    "load-model": _LOADS,
    "repository-poll-secs": _LOADS,
    "model-namespacing": "the supervisor knows models by their names alone",
    "disable-auto-complete-config": _SET,
    "strict-model-config": _SET,
    "exit-timeout-secs": "use --drain-timeout of inflight serve, before the --",
    "exit-on-error": _READY,
    "strict-readiness": _READY,
    "log-file": _READS,
    "log-format": _READS,
    "log-info": _READS,
    "log-warning": _READS,
    "log-error": _READS,
}
"""Option of tritonserver -> why it is not handed on, or what to use."""

REGION_PREFIX = "shm-region-prefix-name"
"""Setting of tritonserver's Python backend by which the supervisor finds a server's shared memory."""


def check(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError for the first argument that the supervisor does not hand on."""
    for option, value in _options(arguments):
        if option in ("help", "version"):
            raise ConfigurationError(f"--{option} is not handed on: ask tritonserver itself")
        if option in OWNED:
            raise ConfigurationError(f"tritonserver's --{option} is inflight's own: {OWNED[option]}")
        if option == "backend-config" and REGION_PREFIX in value:
            raise ConfigurationError(
                f"tritonserver's {REGION_PREFIX} is inflight's own: the supervisor finds shared memory by it"
            )
        file = _trace_file(option, value)
        if file and not Path(file).is_absolute():
            raise ConfigurationError(
                f"the trace file {file} needs a full path: tritonserver runs in a folder that is removed at the end"
            )


def trace_settings(arguments: Sequence[str]) -> set[str]:
    """Names of the settings of tritonserver's tracing that are given, such as "rate" or "triton,file"."""
    return {value.partition("=")[0] for option, value in _options(arguments) if option == "trace-config"}


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each option; the value is "" where it has none. It may follow as the next argument."""
    place = 0
    while place < len(arguments):
        word = arguments[place]
        if not word.startswith("--") or word == "--":
            raise ConfigurationError(f"{word!r} is no option of tritonserver: behind the -- stand its options alone")
        name, equals, value = word[2:].partition("=")
        place += 1
        if not equals and place < len(arguments) and not arguments[place].startswith("--"):
            value = arguments[place]
            place += 1
        yield name, value


def _trace_file(option: str, value: str) -> str:
    """The file that this option makes traces go to; "" if it names none."""
    if option == "trace-file":
        return value
    mode, _, setting = value.partition(",")
    return setting.removeprefix("file=") if (option, mode) == ("trace-config", "triton") and "file=" in setting else ""
