"""What mpiexec would be told in vain is refused before it starts, with its key.

Run: pytest ci/unit/executor/launchers/test_mpi.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.launchers.mpi import Mpi


def test_a_hostfile_and_an_interface_must_be_there(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    config = EngineConfig(tensor_parallel_size=2, mpi_hostfile=str(hosts), mpi_interface="lo")
    with pytest.raises(ConfigurationError, match=f"mpi_hostfile: there is no file {hosts}"):
        Mpi(config)
    hosts.write_text("here:2\n")
    Mpi(config)
    with pytest.raises(ConfigurationError, match=r"mpi_interface: this machine has no .* nobody0; it has .*lo"):
        Mpi(EngineConfig(tensor_parallel_size=2, mpi_hostfile=str(hosts), mpi_interface="nobody0"))
