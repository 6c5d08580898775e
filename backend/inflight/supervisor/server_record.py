"""What a running server is, for the next supervisor: a file in its run directory.

A supervisor is killed without a warning, so the file is written before the server starts, and never changes.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import msgspec

from inflight import __version__
from inflight.model_config import CONFIG
from inflight.supervisor.api_key import ApiKey
from inflight.supervisor.options import ServeOptions
from inflight.supervisor.repository import ServedRepository

FILE = "server.json"

OF_THE_SUPERVISOR = {
    "ready_timeout",
    "drain_timeout",
    "canary_period",
    "adopt_timeout",
    "verbose",
    "log_file",
    "on_ready",
}
"""Options that no other process of the server knows: another supervisor may have others."""


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    configuration: dict[str, str]
    """See `describe`."""
    namespace: str
    """That of the server's pids: containers may share a folder, but none can supervise another one's processes."""
    prefix: str
    """Of the names of its shared-memory regions."""
    command: list[str]
    variables: dict[str, str]
    """Of tritonserver's environment, beside those of whoever starts it."""
    endpoints: dict[str, str]
    """Purpose ("gRPC", "HTTP", "metrics", "OpenAI") -> "host:port", for all that it serves."""
    api_key: str
    """"" = its APIs are open."""
    fetched: dict[str, str] = {}
    """Name of a model on the hub -> the folder that it stood for when the server was started."""

    def write(self, run_directory: Path) -> None:
        (run_directory / FILE).write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, run_directory: Path) -> ServerRecord | None:
        """None if there is none, or one of another version of inflight."""
        try:
            return msgspec.json.decode((run_directory / FILE).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def differences(self, configuration: dict[str, str]) -> list[str]:
        """What this server has otherwise than `configuration`, by name."""
        names = self.configuration.keys() | configuration.keys()
        return sorted(name for name in names if self.configuration.get(name) != configuration.get(name))


def describe(options: ServeOptions, served: ServedRepository, api_key: ApiKey) -> dict[str, str]:
    """All that two servers must have in common so that one is as good as the other, by the names of options.

    The files of a checkpoint count by their path alone. Of the environment nothing counts but what the options say."""
    names = {field.name for field in fields(options)} - OF_THE_SUPERVISOR
    found = {name: _text(getattr(options, name)) for name in names}
    if options.openai is not None:
        file = Path(options.openai.api_key_file)
        keys = _digest(file.read_bytes()) if file.is_file() else ""
        found["openai"] += f" {file.resolve()} {keys}"
        found["drain_timeout"] = str(options.drain_timeout)
    if options.api_key_file is not None:
        found["api_key_file"] += f" {_digest(api_key.value.encode())}"
    for name in (*served.models, *served.attached):
        found[f"the config.pbtxt of {name}"] = _digest((served.path / name / CONFIG).read_bytes())
    found["installation"] = f"{__version__} {Path(__file__).resolve()} {sys.executable}"
    return found


def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _text(value: object) -> str:
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, Mapping):
        return str(sorted(value.items()))
    return str(value)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
