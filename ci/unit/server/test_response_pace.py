"""Streams under way wait for their pace, lose nothing by it, and nobody else waits.

Run: pytest ci/unit/server/test_response_pace.py
"""

from __future__ import annotations

from types import SimpleNamespace

import fake_pb_utils as pb
import fake_tokenizer
import pytest
from fake_executor import FakeExecutor, tokens

from inflight.config import EngineConfig
from inflight.errors import StepFailed
from inflight.result import FinishReason, Response
from inflight.server.backend_server import BackendServer
from inflight.server.tensors.dialects import LLM
from inflight.server.threads import response_pace
from inflight.server.threads.response_pace import ResponsePace, choose_rate
from inflight.server.threads.sending_thread import SendingThread
from inflight.server.work_items import WorkItems

PROMPT = {"text_input": "hi", "max_tokens": 8}


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def paced(executor: FakeExecutor):
    """A server that may send one response to a stream under way in an hour."""
    pace = ResponsePace(1 / 3600)
    items, ended = WorkItems(), []
    sending = SendingThread(executor, items, pace, lambda item, last: ended.append(item.request.request_id))
    builder = BackendServer(
        pb_utils=pb,
        executor=executor,
        tokenizer=fake_tokenizer.byte_tokenizer(),
        dialect=LLM,
        config=EngineConfig(),
        model_name="llm",
        model_version="1",
        instance="llm_0_0",
    )
    builder._items = items
    builder._tokenizing.start()

    def accept(request: pb.InferenceRequest) -> None:
        builder.accept(request)
        builder._tokenizing.join()

    yield SimpleNamespace(pace=pace, sending=sending, accept=accept, ended=ended)
    builder._tokenizing.stop()


def test_a_stream_under_way_waits_for_the_pace_and_loses_nothing(paced, executor: FakeExecutor) -> None:
    first, second = pb.request({**PROMPT, "stream": True}), pb.request({**PROMPT, "stream": True})
    for request in (first, second):
        paced.accept(request)
    one, two = executor.enqueued
    paced.pace.count(1)
    paced.sending.deliver([tokens(one, [97])])  # the pace is closed; a first response never waits
    paced.sending.deliver([tokens(one, [98]), tokens(two, [120])])
    paced.sending.deliver([tokens(one, [99])])
    texts = [[response["text_output"] for response in request.sender.responses] for request in (first, second)]
    assert texts == [["a"], ["x"]]
    paced.sending.deliver([tokens(one, [100], FinishReason.LENGTH), tokens(two, [121])])  # nor does a last one
    assert [response["text_output"] for response in first.sender.responses] == ["a", "bcd"]
    assert first.sender.num_finals == 1 and second.sender.num_finals == 0
    paced.pace._opens_at = 0.0
    paced.sending.deliver([])
    assert [response["text_output"] for response in second.sender.responses] == ["x", "y"]
    paced.sending.deliver([Response.of_error(two, StepFailed("gone"))])
    assert second.sender.num_finals == 1 and paced.ended == [one, two]


def test_held_tokens_leave_before_the_error_that_ends_their_stream(paced, executor: FakeExecutor) -> None:
    request = pb.request({**PROMPT, "stream": True})
    paced.accept(request)
    (key,) = executor.enqueued
    paced.pace.count(1)
    paced.sending.deliver([tokens(key, [97])])
    paced.sending.deliver([tokens(key, [98])])
    assert len(request.sender.responses) == 1
    paced.sending.deliver([Response.of_error(key, StepFailed("gone"))])
    assert [response["text_output"] for response in request.sender.responses[:2]] == ["a", "b"]
    assert request.sender.num_finals == 1


def test_who_never_waits_does_not_close_the_pace(paced, executor: FakeExecutor) -> None:
    """First and last responses, and tokens of a request that is not streamed: a stream could starve behind them."""
    stream, other = pb.request({**PROMPT, "stream": True}), pb.request({**PROMPT, "exclude_input_in_output": True})
    for request in (stream, other):
        paced.accept(request)
    streamed, whole = executor.enqueued
    paced.sending.deliver([tokens(streamed, [97]), tokens(whole, [97])])
    paced.sending.deliver([tokens(whole, [98], FinishReason.LENGTH)])
    assert [response["text_output"] for response in other.sender.responses] == ["ab"]
    assert paced.pace.seconds_closed() == 0.0
    paced.sending.deliver([tokens(streamed, [98])])
    assert [response["text_output"] for response in stream.sender.responses] == ["a", "b"]
    assert paced.pace.seconds_closed() > 3500
    paced.sending.deliver([tokens(streamed, [99], FinishReason.LENGTH)])
    assert stream.sender.num_finals == 1 and paced.pace.seconds_closed() < 3601


def test_the_pace_is_for_cpus_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_rate(-1, "cpu", 4) == 240.0
    assert choose_rate(-1, "cuda", 4) == 0.0
    assert choose_rate(50, "cuda", 4) == 50
    assert choose_rate(0, "cpu", 4) == 0
    unbounded = ResponsePace(0.0)
    unbounded.count(1000)
    assert unbounded.seconds_closed() == 0.0
    monkeypatch.setattr(response_pace, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    pace = ResponsePace(100.0)
    pace.count(5)
    assert pace.seconds_closed() == pytest.approx(0.05)
    pace.count(5)
    assert pace.seconds_closed() == pytest.approx(0.1)
