"""Do the MPI library and the MPI launcher belong together? Asked by running them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from inflight.errors import ConfigurationError

RANKS = 2
"""With one rank a launcher of another MPI goes unnoticed: each process believes it is alone, which then is true."""

PROGRAM = """
import os
from mpi4py import MPI
version = MPI.Get_library_version().splitlines()[0]
os.write(1, f"size {MPI.COMM_WORLD.size} {version}\\n".encode())
"""
"""Each rank writes its line at once, so that lines of two ranks never mix."""


def find_mpiexec() -> Path:
    """The launcher of the environment that runs us, else the one on PATH."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    if found := shutil.which("mpiexec", path=path):
        return Path(found)
    raise ConfigurationError(f"mpiexec is not installed: {sys.executable} -m pip install mpich mpi4py")


def check_mpi(mpiexec: Path | None = None, *, timeout: float = 30.0) -> str:
    """Start two ranks and see that they find each other. Returns the library's version line.

    Raises ConfigurationError with one sentence if they do not.
    """
    launcher = mpiexec or find_mpiexec()
    command = [str(launcher), "-n", str(RANKS), sys.executable, "-c", PROGRAM]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{launcher} did not start {RANKS} ranks within {timeout:.0f} s; {REMEDY}") from None
    except OSError as error:
        raise ConfigurationError(f"{launcher} cannot be run ({error.strerror}); {REMEDY}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("size ")]
    if "No module named 'mpi4py'" in done.stderr:
        raise ConfigurationError(f"mpi4py is not installed: {sys.executable} -m pip install mpi4py mpich")
    sizes = [line.split()[1] for line in lines]
    if done.returncode == 0 and sizes == [str(RANKS)] * RANKS:
        return lines[0].split(maxsplit=2)[2]
    library = f" ({lines[0].split(maxsplit=2)[2]})" if lines else ""
    raise ConfigurationError(f"the launcher {launcher} does not belong to mpi4py's MPI library{library}; {REMEDY}")


REMEDY = "put the mpiexec of mpi4py's own MPI first on PATH, or pip install mpich mpi4py in one environment"
