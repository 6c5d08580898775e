"""A backend directory for a tritonserver that somebody else starts: by hand, or as Triton Model Analyzer does.

Such a server has no supervisor: nobody restarts it, loads its models again or removes its shared memory.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.supervisor import installation


@dataclass(frozen=True, kw_only=True)
class BackendDirectory:
    """What starts a tritonserver with our backend."""

    tritonserver: Path
    backends: Path
    """For --backend-directory."""
    environment: dict[str, str]
    """Variables that the server needs."""

    @property
    def commands(self) -> str:
        """For a shell; the model repository stands as FOLDER."""
        command = (
            f"{shlex.quote(str(self.tritonserver))} --backend-directory={shlex.quote(str(self.backends))} "
            "--disable-auto-complete-config --model-repository=FOLDER"
        )
        return "\n".join(
            [*(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()), command]
        )


def lay_out(directory: Path, tritonserver: Path | None = None) -> BackendDirectory:
    """Make `directory`, which must not exist or be empty, with links to this installation. `tritonserver`: the binary;
    None = the one found. Raises ConfigurationError."""
    try:
        if directory.exists() and any(directory.iterdir()):
            raise ConfigurationError(f"{directory} is not empty: name a folder that does not exist")
        pieces = installation.find(tritonserver)
        backends, variables = pieces.lay_out(directory.absolute())
    except OSError as error:
        raise ConfigurationError(f"{error.filename or directory}: {error.strerror}") from None
    return BackendDirectory(tritonserver=pieces.tritonserver, backends=backends, environment=variables)
