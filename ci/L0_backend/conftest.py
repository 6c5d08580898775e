"""A tritonserver of little room, and streams to the one that all folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raw_stream import RawStream
from server_process import ServerProcess


@pytest.fixture(scope="session")
def narrow_server() -> Iterator[ServerProcess]:
    """One request at a time, one waiting, and a small KV cache."""
    parameters = {"max_batch_size": "1", "max_queue_size": "1", "max_tokens_in_paged_kv_cache": "512"}
    with ServerProcess(parameters=parameters) as running:
        yield running


@pytest.fixture
def stream(server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(server.grpc_url) as opened:
        yield opened


@pytest.fixture
def other_stream(server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(server.grpc_url) as opened:
        yield opened
