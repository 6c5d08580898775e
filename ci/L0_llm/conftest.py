"""A tritonserver with the default model as it comes, for all tests of this folder that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import ServerProcess

from inflight_client import Client

PATIENCE = 120.0
"""Seconds after which an answer counts as lost."""


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        processes = running.pids
        yield running
        assert set(processes) <= set(running.pids), "a process of the server died on the way"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.grpc_url, timeout=PATIENCE) as opened:
        yield opened
