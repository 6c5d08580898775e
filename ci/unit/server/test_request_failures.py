"""A failure while a request is answered harms that request alone, and the metrics count how each one ended."""

from __future__ import annotations

from types import SimpleNamespace

import fake_pb_utils as pb
import pytest
from calls import until
from fake_executor import FakeExecutor, tokens
from played_backend import LONG, PROMPT, counted, counted_accepted, finish

from inflight.errors import (
    EngineUnavailable,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    StepFailed,
)
from inflight.metric_families import OUTCOMES
from inflight.result import FinishReason, Response
from inflight.server.backend_server import BackendServer


@pytest.mark.parametrize("finish", [FinishReason.NOT_FINISHED, FinishReason.LENGTH], ids=["midway", "at the end"])
@pytest.mark.parametrize("place", ["add", "_dialect", "_reply"])
def test_a_failure_while_answering_harms_one_request(
    ask, server, executor: FakeExecutor, monkeypatch, capsys, place, finish
) -> None:
    broken, sound = ask({**PROMPT, "stream": True}), ask({**PROMPT, "stream": True})
    broken_id, sound_id = executor.enqueued

    def explode(*arguments: object) -> None:
        raise ValueError("canary prompt")

    item = server._items.find(broken_id)
    if place == "add":
        monkeypatch.setattr(item, "add", explode)
    elif place == "_dialect":
        monkeypatch.setattr(item, "_dialect", SimpleNamespace(write=explode))
    else:
        unable = SimpleNamespace(**{**vars(pb), "Tensor": explode})
        monkeypatch.setattr(item._reply, "_pb_utils", unable)
    executor.push(tokens(broken_id, [97], finish), tokens(sound_id, [98], FinishReason.LENGTH))
    assert broken.finished.wait(LONG) and sound.finished.wait(LONG)
    if finish is FinishReason.NOT_FINISHED:
        until(lambda: executor.cancelled == [broken_id], "the engine is told")
        executor.push(tokens(broken_id, [], FinishReason.CANCELLED))
    server.close()
    assert broken.error.code() == pb.TritonError.INTERNAL and len(broken.responses) == 1 and not broken.misuse
    assert "canary" not in broken.error.message() + capsys.readouterr().err
    assert sound.text == "b"
    assert [counted(outcome) for outcome in ("failed", "completed")] == [1, 1]


def test_the_server_knows_when_it_cannot_answer_any_more(
    server: BackendServer, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat stops then, so that the supervisor brings the model back."""

    def explode(**_: object) -> list[Response]:
        raise ValueError

    assert server.is_ready() and not server._sending.has_failed
    monkeypatch.setattr(executor, "await_responses", explode)
    server._sending._thread.join(LONG)
    assert server._sending.has_failed and not server.is_ready()
    server.close()


def test_outcomes_reach_the_metrics(ask, server: BackendServer, executor: FakeExecutor) -> None:
    finish(executor, ask(PROMPT))
    ask({})
    executor.refusal = QueueFull()
    ask(PROMPT)
    server.close()
    assert [counted(outcome) for outcome in ("completed", "rejected", "queue_full")] == [1, 1, 1]


def test_each_accepted_request_has_one_outcome(ask, server: BackendServer, executor: FakeExecutor, senders) -> None:
    """Of every kind. `senders` compares the counts after every test; here they are known."""
    finish(executor, ask(PROMPT))
    for last in (RequestTimedOut("too late"), EngineUnavailable("the ranks died"), StepFailed("the step failed")):
        ask(PROMPT)
        executor.push(Response.of_error(executor.last.request_id, last))
    leaving = ask({**PROMPT, "stream": True})
    ask({**PROMPT, "stream": True}, request_id="7")
    left_id, stopped_id = executor.enqueued
    leaving.client_left = True
    server._watch.look()
    ask({"stop": True}, request_id="7")  # which is no request by itself
    executor.push(*[tokens(each, [97], FinishReason.CANCELLED) for each in (left_id, stopped_id)])
    ask({"stop": True}, request_id="unknown")
    ask({})
    server.accept(SimpleNamespace())  # nobody can be told
    executor.refusal = QueueFull()
    ask(PROMPT)
    executor.refusal = None
    ask(PROMPT)  # is in flight when the server is closed
    server.close(drain_seconds=0.0)
    ends = {outcome: counted(outcome) for outcome in OUTCOMES.series}
    assert ends == {
        "completed": 1,
        "cancelled": 2,
        "timed_out": 1,
        "rejected": 2,
        "queue_full": 1,
        "unavailable": 2,
        "failed": 2,
    }
    assert counted_accepted() == sum(ends.values())


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (RequestTimedOut("it waited longer than the time it was allotted"), "timed_out"),
        (QueueFull(), "queue_full"),
        (EngineUnavailable("the ranks died"), "unavailable"),
        (RequestCancelled("stopped"), "cancelled"),
        (StepFailed("the step failed"), "failed"),
    ],
)
def test_errors_of_one_code_are_counted_apart(ask, server, executor: FakeExecutor, last, outcome) -> None:
    sender = ask(PROMPT)
    executor.push(Response.of_error(executor.last.request_id, last))
    assert sender.finished.wait(LONG)
    server.close()
    assert counted(outcome) == 1 and sum(counted(each) for each in OUTCOMES.series) == 1
