"""Servers of the toy model, and streams to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from server_process import ServerProcess
from toy_client import TOY_REPOSITORY, Stream


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A server of its own for a test that ends or breaks it."""
    with ServerProcess(model_repository=TOY_REPOSITORY, drain_timeout=120.0) as running:
        yield running


@pytest.fixture
def open_stream() -> Iterator[Callable[[ServerProcess], Stream]]:
    """Opens streams that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_one(server: ServerProcess) -> Stream:
            stream = Stream(server.grpc_url)
            stack.callback(stream.close)
            return stream

        yield open_one
