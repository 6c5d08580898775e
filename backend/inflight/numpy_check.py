"""Whether the installed numpy works with a stub of tritonserver's Python backend.

The supervisor asks before it starts a server, and the stub itself when it loads a model, because a server may also be
started without the supervisor. Imports nothing heavy.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from inflight.errors import ConfigurationError

REMEDY = "install 'numpy<2' in the environment of inflight"


def check_numpy(stub: Path) -> None:
    """Raise ConfigurationError unless the program `stub` can read text tensors with the installed numpy.

    A stub that was built before NumPy 2 crashes at its first text under it. Such a stub contains the name of a module
    that NumPy 2 has moved; one that was built since composes the name at run time.
    """
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(f"numpy is not installed: {REMEDY}") from None
    if int(version.split(".")[0]) >= 2 and b"numpy.core.multiarray" in stub.read_bytes():
        raise ConfigurationError(f"numpy {version} does not work with this tritonserver's Python stub: {REMEDY}")
