"""The key to those of tritonserver's APIs through which a client could take over the server.

A model repository call can upload a model that is a Python program; shared memory, logging and traces reach memory and
files. tritonserver takes the key only as an argument, which every user of the machine can read in /proc: `hide`
writes over it there as soon as the server has read it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigurationError

APIS = "model-repository,shared-memory,logging,trace"
HEADER = "inflight-api-key"
"""Its name over HTTP."""
GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"
"""tritonserver's own prefix stands before it over gRPC."""

WELL_FORMED = re.compile(r"[A-Za-z0-9._~+/-]{16,256}")
"""What a header and tritonserver's argument can both hold."""

ARG_START, ARG_END = 45, 46
"""Fields of /proc/PID/stat after the name: where the command line lies in memory."""


@dataclass(frozen=True)
class ApiKey:
    """`value` "": the APIs are open."""

    value: str

    @classmethod
    def choose(cls, *, open_apis: bool, file: Path | None) -> ApiKey:
        """The key that the options ask for. Raises ConfigurationError."""
        if open_apis and file is not None:
            raise ConfigurationError("--open-apis and --api-key-file exclude each other: an open API has no key")
        if open_apis:
            return cls("")
        return cls(_read(file) if file is not None else secrets.token_hex(32))

    @property
    def arguments(self) -> tuple[str, ...]:
        """For tritonserver's command line."""
        if not self.value:
            return ()
        restricted = f"{APIS}:{HEADER}={self.value}"
        return (f"--http-restricted-api={restricted}", f"--grpc-restricted-protocol={restricted}")

    @property
    def grpc_headers(self) -> Mapping[str, str]:
        return {GRPC_HEADER: self.value} if self.value else {}

    def hide(self, pid: int) -> None:
        """Write over the key in a process's command line. Raises OSError where the system does not allow it."""
        if not self.value:
            return
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(fields[ARG_START]), int(fields[ARG_END])
        key = self.value.encode()
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            for found in re.finditer(re.escape(key), arguments):
                memory.seek(start + found.start())
                memory.write(b"x" * len(key))


def _read(file: Path) -> str:
    try:
        value = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--api-key-file {file} cannot be read: {error}") from None
    if not WELL_FORMED.fullmatch(value):
        raise ConfigurationError(
            f"--api-key-file {file} holds no key: 16 to 256 letters, digits and any of . _ ~ + / - are one"
        )
    return value
