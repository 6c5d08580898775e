"""A backend directory for a tritonserver that somebody else starts: by hand, or as Triton Model Analyzer does.

Such a server has no supervisor: nobody restarts it, loads its models again or removes its shared memory.
"""

from __future__ import annotations

import shlex
import shutil
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
    None = the one found. Raises ConfigurationError, and then leaves nothing behind."""
    pieces = installation.find(tritonserver)
    folder = directory.absolute()
    made = not folder.exists()
    try:
        if folder.is_symlink() and made:
            raise ConfigurationError(f"{directory} is a link to a folder that does not exist: name another one")
        if not made and any(folder.iterdir()):
            raise ConfigurationError(f"{directory} is not empty: name a folder that does not exist")
        # Made first, so that all below it can be removed if anything fails.
        folder.mkdir(parents=True, exist_ok=True)
        try:
            backends, variables = pieces.lay_out(folder)
        except OSError:
            for child in folder.iterdir():
                shutil.rmtree(child)
            if made:
                folder.rmdir()
            raise
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be made: {error.strerror}") from None
    return BackendDirectory(tritonserver=pieces.tritonserver, backends=backends, environment=variables)
