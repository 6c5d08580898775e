"""A client of the tritonserver that all folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import ServerProcess

from inflight_client import Client

PATIENCE = 120.0
"""Seconds after which an answer counts as lost."""


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.grpc_url, timeout=PATIENCE) as opened:
        yield opened
