"""`inflight install-server`: puts tritonserver into the environment of this interpreter.

It comes by pip in the wheel of nvidia-pytriton, which is installed without the packages that it asks for: they exclude
interpreters and packages that the server itself has no quarrel with, and no wheel can require another one that way.
Knows nothing of how a server is started.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.supervisor import installation

PACKAGE, VERSION = "nvidia-pytriton", "0.7.0"


def install_server() -> str:
    """Install tritonserver unless a usable one is there. Returns a sentence that says where it is; raises
    ConfigurationError. pip prints its progress."""
    installation.check_machine()
    installation.find_libpython()
    present = _installed_version()
    if present in (None, VERSION) and (server := _usable()):
        return f"tritonserver is installed already: {server}"
    _check_environment()
    # What pip believes to be there already may have lost files.
    again = ["--force-reinstall"] if present == VERSION else []
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-deps", *again]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=False)
    if done.returncode:
        raise ConfigurationError(f"pip could not install {PACKAGE} {VERSION}, for the reason that it gives above")
    importlib.invalidate_caches()
    return f"tritonserver is installed: {installation.find().tritonserver}"


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable() -> Path | None:
    """The binary that a server would be started with; None if there is none, or its Python backend is missing."""
    try:
        binary = installation.find_tritonserver()
        installation.find_backend(binary.resolve().parent.parent)
    except ConfigurationError:
        return None
    return binary


def _check_environment() -> None:
    """Raise unless pip can install into the environment of this interpreter."""
    marker = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if sys.prefix == sys.base_prefix and marker.is_file():
        raise ConfigurationError(
            f"{sys.executable} belongs to the system, which installs its packages itself: use a virtual environment, "
            "with inflight in it"
        )
    if importlib.util.find_spec("pip") is None:
        raise ConfigurationError(f"there is no pip to install tritonserver with: {sys.executable} -m ensurepip adds it")
