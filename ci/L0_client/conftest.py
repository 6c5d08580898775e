"""A tritonserver that serves toy_repository/, for all tests of this folder.

Its model answers as its prompt tells it to, so that the client meets every kind of answer, error and end of a stream as
a real server sends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_process import ServerProcess

from inflight_client import Client

TOY_REPOSITORY = Path(__file__).parent / "toy_repository"


@pytest.fixture(scope="session")
def toy_server(shared_servers: ExitStack) -> ServerProcess:
    return shared_servers.enter_context(ServerProcess(model_repository=TOY_REPOSITORY))


@pytest.fixture
def url(toy_server: ServerProcess) -> str:
    return toy_server.grpc_url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, timeout=180) as opened:
        opened.wait_until_ready(180)  # if the previous test crashed the server, it is restarted
        yield opened
