"""Finds what is installed: tritonserver, its Python backend, and the stub for this Python interpreter.

Copies or links the parts into a server's private directory. A wrong or missing part raises ConfigurationError with one
sentence that names the remedy. Knows nothing of models, ports or processes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from inflight import __version__
from inflight.errors import ConfigurationError
from inflight.numpy_check import check_numpy
from inflight.supervisor.processes import STUB

OLDEST_GLIBC = (2, 35)
"""The pip-installed tritonserver is built against it."""

IMAGE = Path("/opt/tritonserver")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Checked paths of everything that a server is made of."""

    tritonserver: Path
    python_backend: Path
    """Folder of libtriton_python.so and triton_python_backend_utils.py."""
    stub: Path
    libraries: Path | None
    """Folder of the libraries that the wheel has for its stub; None if they are the system's."""
    libpython: Path
    model_py: Path
    """The backend's model.py, in the folder that tritonserver puts on its import path."""

    def lay_out(self, directory: Path) -> tuple[Path, dict[str, str]]:
        """Copy or link the parts into `directory`. Returns the backend directory, and the environment variables that a
        server needs.

        The folders are as deep as in the wheel, because its stub looks for libraries four folders up. It finds this
        interpreter's libpython there, also under the name of the copy that the wheel has.
        """
        backends = directory / "pytriton" / "tritonserver" / "backends"
        libraries = directory / "nvidia_pytriton.libs"
        python = backends / "python"
        for folder in (python, libraries):
            folder.mkdir(parents=True)
        for source in self.python_backend.iterdir():
            if source.name not in (STUB, "__pycache__"):
                # Copied, because tritonserver refuses a backend's library that is a link to another folder.
                shutil.copy2(source, python / source.name)
        shutil.copy2(self.stub, python / STUB)
        (backends / "inflight").symlink_to(self.model_py.parent)
        for source in self.libraries.iterdir() if self.libraries else ():
            ours = re.match(r"libpython3.*\.so", source.name) is not None
            (libraries / source.name).symlink_to(self.libpython if ours else source)
        own = libraries / libpython_name()
        if not own.is_symlink():
            own.symlink_to(self.libpython)
        return backends, {
            "PATH": _prepended(str(Path(sys.executable).parent), os.environ.get("PATH")),
            "LD_LIBRARY_PATH": _prepended(str(libraries), os.environ.get("LD_LIBRARY_PATH")),
        }


def find(tritonserver: Path | None = None) -> Installation:
    """Find and check the installation. `tritonserver`: the binary to use instead of the one found."""
    check_machine()
    check_client()
    binary = find_tritonserver(tritonserver)
    root = binary.resolve().parent.parent
    python_backend, stub = find_backend(root)
    libraries = root.parents[1] / "nvidia_pytriton.libs"
    check_numpy(stub)
    return Installation(
        tritonserver=binary,
        python_backend=python_backend,
        stub=stub,
        libraries=libraries if libraries.is_dir() else None,
        libpython=find_libpython(),
        model_py=find_model_py(),
    )


def check_machine() -> None:
    """Raise unless tritonserver's binaries can run here at all."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise ConfigurationError(
            f"tritonserver needs x86-64 Linux, this is {platform.system()} on {platform.machine()}"
        )
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < OLDEST_GLIBC:
        needed = ".".join(map(str, OLDEST_GLIBC))
        raise ConfigurationError(f"tritonserver needs glibc {needed} or newer, this system has {version}")


def check_client() -> None:
    """Raise if the client of another version lies over the one that comes with the engine."""
    try:
        version = importlib.metadata.version("inflight-client")
    except importlib.metadata.PackageNotFoundError:
        return
    if version != __version__:
        raise ConfigurationError(
            f"inflight {__version__} brings its client, which inflight-client {version} has overwritten: uninstall "
            "both, and install inflight again"
        )


def find_tritonserver(wanted: Path | None = None) -> Path:
    """The binary: the one wanted, else the installed wheel's, the image's, PATH's."""
    if wanted is not None:
        if not os.access(wanted, os.X_OK) or wanted.is_dir():
            raise ConfigurationError(f"{wanted} is not an executable: give the path of tritonserver's binary")
        return wanted.absolute()
    wheel = importlib.util.find_spec("pytriton")
    roots = [Path(place) / "tritonserver" for place in (wheel.submodule_search_locations or ())] if wheel else []
    for root in (*roots, IMAGE):
        if os.access(root / "bin" / "tritonserver", os.X_OK):
            return root / "bin" / "tritonserver"
    if on_path := shutil.which("tritonserver"):
        return Path(on_path)
    raise ConfigurationError(
        "tritonserver is not installed: run inflight install-server, or name its binary with --tritonserver"
    )


def find_backend(root: Path) -> tuple[Path, Path]:
    """The folder of the Python backend of the tritonserver in `root`, and the stub for this interpreter's version."""
    folder = root / "backends" / "python"
    if not (folder / "libtriton_python.so").is_file():
        raise ConfigurationError(
            f"{root} has no Python backend: run inflight install-server, or use NVIDIA's tritonserver image"
        )
    return folder, find_stub(root)


def find_stub(root: Path) -> Path:
    """The stub for this interpreter's version: a wheel has one for each, an image has one."""
    of_version = root / "python_backend_stubs" / PYTHON / STUB
    if of_version.is_file():
        return of_version
    only = root / "backends" / "python" / STUB
    if not only.is_file():
        raise ConfigurationError(f"{root} has no Python backend stub for Python {PYTHON}")
    built_for = re.search(rb"libpython(3\.\d+)\.so", only.read_bytes())
    if built_for and built_for[1].decode() != PYTHON:
        raise ConfigurationError(
            f"the stub of {root} runs Python {built_for[1].decode()}, but inflight is installed in Python {PYTHON}: "
            "install both for the same version"
        )
    return only


def libpython_name() -> str:
    """File name of the shared library that the stub asks the loader for."""
    return f"libpython{PYTHON}.so.1.0"


def find_libpython(folders: list[Path] | None = None) -> Path:
    """This interpreter's own shared library, never that of another patch release."""
    if folders is None:
        names = [sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LIBPL"), f"{sys.base_prefix}/lib"]
        multiarch = sysconfig.get_config_var("MULTIARCH") or ""
        folders = [Path(name) for name in names if name]
        folders += [folder / multiarch for folder in folders if multiarch]
    other = None
    for folder in folders:
        library = folder / libpython_name()
        if library.is_file():
            version = _version_of(library)
            if version == platform.python_version():
                return library
            other = f"{library} is Python {version}'s"
    reason = other or f"there is no {libpython_name()}"
    raise ConfigurationError(
        f"tritonserver's stub needs the shared library of this very Python {platform.python_version()}, and {reason}: "
        f"install the package libpython{PYTHON}, or a Python built with --enable-shared"
    )


def find_model_py() -> Path:
    """The backend's model.py."""
    return _find_data("model.py", depth=1)


def find_model_repository() -> Path:
    """The model repository that comes with inflight."""
    return _find_data("model_repository", depth=2)


def find_apis() -> Path:
    """The folder of the dialect models that come with inflight."""
    return _find_data("apis", depth=1)


def _find_data(name: str, *, depth: int) -> Path:
    """A file or folder that comes with the package: from a wheel in `inflight_shipped` beside it, in a source tree
    `depth` folders above it. Raises ConfigurationError."""
    package = Path(__file__).resolve().parents[1]
    # In this order: beside a package from a wheel lie other projects' modules, which may have these names.
    for place in (package.parent / "inflight_shipped", package.parents[depth - 1]):
        if (place / name).exists():
            return place / name
    raise ConfigurationError(f"{name} is missing near {package}: install inflight again")


def _version_of(library: Path) -> str:
    get_version = ctypes.CDLL(str(library)).Py_GetVersion
    get_version.restype = ctypes.c_char_p
    return str(get_version().decode().split()[0])


def _prepended(folder: str, folders: str | None) -> str:
    return f"{folder}:{folders}" if folders else folder
