"""A started BackendServer over a fake pb_utils and an engine that the test plays."""

from __future__ import annotations

import fake_pb_utils as pb
import fake_tokenizer
import pytest
from fake_executor import FakeExecutor
from played_backend import counted, counted_accepted

from inflight.config import EngineConfig
from inflight.metric_families import OUTCOMES
from inflight.server.backend_server import BackendServer
from inflight.server.tensors.dialects import LLM


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def senders(server: BackendServer):
    """Every sender that `ask` made; at the end each must have had one final response and no misuse."""
    made: list[pb.ResponseSender] = []
    yield made
    server.close(drain_seconds=0.0)
    assert [sender.num_finals for sender in made] == [1] * len(made)
    assert not [sender.misuse for sender in made if sender.misuse]
    assert not pb.MetricFamily.misuse
    assert server._open_requests._number == 0
    assert counted_accepted() == sum(map(counted, OUTCOMES.series))


@pytest.fixture
def server(executor: FakeExecutor, request: pytest.FixtureRequest) -> BackendServer:
    """Of the dialect that its parameter names, `llm` without one."""
    pb.unloaded.clear()
    pb.MetricFamily.metrics.clear()
    server = BackendServer(
        pb_utils=pb,
        executor=executor,
        tokenizer=fake_tokenizer.byte_tokenizer(),
        dialect=getattr(request, "param", LLM),
        config=EngineConfig(cancellation_check_period_ms=3_600_000),
        model_name="llm",
        model_version="1",
        instance="llm_0_0",
    )
    server.start()
    return server


@pytest.fixture
def ask(server: BackendServer, senders: list[pb.ResponseSender]):
    def ask(inputs: dict, **more) -> pb.ResponseSender:
        request = pb.request(inputs, **more)
        senders.append(request.sender)
        server.accept(request)
        server._tokenizing.join()
        return request.sender

    return ask
