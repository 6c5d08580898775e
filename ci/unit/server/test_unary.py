"""A model that is not decoupled: its one response to a request is the final one."""

from __future__ import annotations

import fake_pb_utils as pb
import fake_tokenizer
import numpy as np
import pytest
from fake_executor import FakeExecutor, tokens
from msgspec import structs
from played_backend import LONG, PROMPT

from inflight.config import EngineConfig
from inflight.result import FinishReason, Response
from inflight.server.backend_server import BackendServer
from inflight.server.reply import LARGE, Reply
from inflight.server.tensors.dialects import LLM, TENSORRT_LLM


@pytest.fixture
def executor() -> FakeExecutor:
    executor = FakeExecutor()
    limits = structs.replace(executor.limits, max_batch_size=4)
    executor._replica_ready(limits, executor.description, max_in_flight=0)
    return executor


@pytest.fixture(params=[LLM, TENSORRT_LLM], ids=lambda dialect: dialect.name)
def server(executor: FakeExecutor, request: pytest.FixtureRequest) -> BackendServer:
    server = BackendServer(
        pb_utils=pb,
        executor=executor,
        tokenizer=fake_tokenizer.byte_tokenizer(),
        dialect=request.param,
        config=EngineConfig(cancellation_check_period_ms=3_600_000),
        model_name="llm_unary",
        model_version="1",
        instance="llm_unary_0_0",
        is_unary=True,
    )
    server.start()
    return server


@pytest.mark.parametrize("server", [LLM], indirect=True)
def test_all_sequences_come_in_one_response(executor: FakeExecutor, ask) -> None:
    sender = ask(PROMPT | {"num_return_sequences": 2})
    request_id = executor.last.request_id
    for index, text in enumerate((b"ab", b"c")):
        ended = tokens(request_id, list(text), FinishReason.LENGTH).result
        assert ended is not None
        result = structs.replace(ended, sequence_index=index, is_final=index == 1)
        executor.push(Response(request_id=request_id, result=result))
    assert sender.finished.wait(LONG)
    (response,) = sender.responses
    assert response["output_ids"] == [[*b"hi", *b"ab"], [*b"hi", *b"c", -1]]


@pytest.mark.parametrize("server", [LLM], indirect=True)
def test_streams_are_refused(ask) -> None:
    sender = ask(PROMPT | {"stream": True})
    assert "Streaming is only supported in decoupled mode." in sender.error.message()


@pytest.mark.parametrize("server", [TENSORRT_LLM], indirect=True)
def test_a_stop_gets_a_response_without_tensors(ask) -> None:
    sender = ask({"stop": True}, request_id="nobody's")
    (response,) = sender.responses
    assert response.names() == [] and response.error() is None


def test_megabytes_go_out_with_the_final_response() -> None:
    sender = pb.ResponseSender()
    Reply(pb, sender, is_unary=True).send({"x": np.zeros(LARGE, np.uint8)}, final=True)
    assert len(sender.responses) == 1 and sender.num_finals == 1
