"""Do the MPI launcher and mpi4py's MPI library belong together? Asked by running them, before a server is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.mpi_launcher import REMEDY, find_launcher, launcher_environment, launcher_options, misfit

RANKS = 2
"""With one rank a launcher of another MPI goes unnoticed: each process believes it is alone, which then is true."""

PROGRAM = """
import os
from mpi4py import MPI
version = MPI.Get_library_version().splitlines()[0]
os.write(1, f"size {MPI.COMM_WORLD.size} {version}\\n".encode())
"""
"""Each rank writes its line at once, so that lines of two ranks never mix."""


def check_mpi(launcher: Path | None = None, *, one_host: bool = True, timeout: float = 30.0) -> str:
    """Start two ranks here and see that they find each other. Returns the library's version line.

    `launcher`: the one to try, if not the one that ranks on one host, or on several, will be launched with. Raises
    ConfigurationError with one sentence if they do not meet within `timeout` seconds.
    """
    launcher = launcher or find_launcher(Path(sys.executable), one_host=one_host)
    command = [str(launcher), *launcher_options(launcher), "-n", str(RANKS), sys.executable, "-c", PROGRAM]
    environment = launcher_environment(os.environ, one_host=True)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"the MPI launcher {launcher} did not start {RANKS} ranks within {timeout:.0f} s: {REMEDY}"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"the MPI launcher {launcher} cannot be run ({error.strerror}): {REMEDY}") from None
    if "No module named 'mpi4py'" in done.stderr:
        raise ConfigurationError(f"mpi4py is not installed: {REMEDY}")
    if "cannot load MPI library" in done.stderr:
        raise ConfigurationError(f"mpi4py finds no MPI library: {REMEDY}")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("size ")]
    library = lines[0][2] if lines else ""
    if done.returncode == 0 and [line[1] for line in lines] == [str(RANKS)] * RANKS:
        return library
    raise ConfigurationError(misfit(launcher, library))
