"""NVIDIA's perf_analyzer: where its binary is, and the environment that it starts in.

The binary is part of tritonclient's wheel. Two shared libraries that it needs are in nvidia-pytriton's wheel under
other names. They are linked, under the names that it asks for, into a folder of the user's cache: one that lasts, so
that a program may become perf_analyzer and leave nothing to clean up. Without that wheel they must be the system's.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from inflight_client._exceptions import LoadTestError

_LIBRARIES = {"libcudart.so.12": "libcudart-*.so.12*", "libb64.so.0d": "libb64-*.so.0d"}
_INSTALL = "install it with: pip install 'tritonclient[grpc]==2.51.0'"


def find() -> Path:
    """The binary beside this Python, else that on PATH. Raises LoadTestError."""
    beside = Path(sys.executable).parent / "perf_analyzer"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("perf_analyzer")
    if found is None:
        raise LoadTestError(f"perf_analyzer is not installed; {_INSTALL}")
    return Path(found)


def environment() -> dict[str, str]:
    """This process's environment, with the folder of its libraries behind those of LD_LIBRARY_PATH: libraries of the
    system come first. Raises LoadTestError if the folder cannot be made, or if there are no libraries."""
    bundled = _bundled_libraries()
    if bundled is None:
        _check_libraries_of_the_system()
        return dict(os.environ)
    try:
        folder = _linked(bundled)
    except OSError as error:
        raise LoadTestError(
            f"perf_analyzer's libraries cannot be linked ({error}): set INFLIGHT_CACHE_DIR to a folder of your own"
        ) from None
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    return {**os.environ, "LD_LIBRARY_PATH": f"{inherited}:{folder}" if inherited else str(folder)}


def _bundled_libraries() -> Path | None:
    """The folder of nvidia-pytriton's libraries; None without that package, as in NVIDIA's image."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.parent / "nvidia_pytriton.libs"


def _check_libraries_of_the_system() -> None:
    missing = []
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    if missing:
        raise LoadTestError(
            f"perf_analyzer does not start without {' and '.join(missing)}: pip install --no-deps "
            "nvidia-pytriton==0.7.0 brings both, or packages of your system do, such as Debian's libb64-0d; "
            "load-test --openai URL measures a server of OpenAI's API without perf_analyzer"
        )


def _linked(bundled: Path) -> Path:
    """A folder with links to these libraries, of which each installation has its own."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(os.environ.get("INFLIGHT_CACHE_DIR") or Path(base, "inflight"))
    if not cache.is_absolute():
        raise OSError("there is no home folder")
    digest = hashlib.sha256(os.fsencode(bundled)).hexdigest()[:16]
    folder = cache / "perf-analyzer" / digest
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} belongs to another user, or others may write to it")
    for name, pattern in _LIBRARIES.items():
        for library in sorted(bundled.glob(pattern))[:1]:
            _link(folder / name, library)
    return folder


def _link(link: Path, target: Path) -> None:
    """Make the link, also where an old one leads elsewhere and while others make it."""
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return
    fresh = link.with_name(f"{link.name}.{os.getpid()}")
    try:
        fresh.symlink_to(target)
        fresh.replace(link)
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
