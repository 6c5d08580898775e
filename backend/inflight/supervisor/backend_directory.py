"""A backend directory for a tritonserver that somebody else starts: by hand, or as Triton Model Analyzer does.

Such a server has no supervisor: nobody restarts it, loads its models again or removes its shared memory.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.supervisor import installation


def lay_out(directory: Path, tritonserver: Path | None = None) -> str:
    """Make `directory`, which must not exist or be empty, and return the shell commands that start a server with it.

    It links to this installation. `tritonserver`: the binary; None = the one found. Raises ConfigurationError.
    """
    try:
        if directory.exists() and any(directory.iterdir()):
            raise ConfigurationError(f"{directory} is not empty: name a folder that does not exist")
        pieces = installation.find(tritonserver)
        backends, variables = pieces.lay_out(directory.absolute())
    except OSError as error:
        raise ConfigurationError(f"{error.filename or directory}: {error.strerror}") from None
    command = (
        f"{shlex.quote(str(pieces.tritonserver))} --backend-directory={shlex.quote(str(backends))} "
        "--disable-auto-complete-config --model-repository=FOLDER"
    )
    return "\n".join([*(f"export {name}={shlex.quote(value)}" for name, value in variables.items()), command])
