"""What becomes of requests and of the model when the engine is lost, and when it is shut down."""

from __future__ import annotations

from pathlib import Path

import fake_pb_utils as pb
import pytest
from fake_executor import FakeExecutor
from played_backend import LONG, PROMPT, counted, finish

from inflight.errors import (
    EngineUnavailable,
)
from inflight.result import Response
from inflight.run_directory import RUN_DIRECTORY, UNLOADED
from inflight.server.backend_server import BackendServer


def test_an_engine_that_is_lost_while_a_request_is_taken_answers_it_once(ask, server, executor, senders) -> None:
    def lose_first(request) -> None:
        executor.shutdown()
        server._sending.stop()
        raise EngineUnavailable("the engine was shut down")

    executor.enqueue_request = lose_first
    sender = ask(PROMPT)
    assert sender.error.code() == pb.TritonError.UNAVAILABLE and not sender.misuse
    server.close()
    assert counted("unavailable") == 1


@pytest.fixture
def notes(tmp_path: Path, monkeypatch) -> Path:
    """Where a supervisor looks for the models that were given up."""
    (tmp_path / UNLOADED).mkdir()
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    return tmp_path / UNLOADED


def test_a_dead_engine_ends_every_request_and_gives_the_model_up(ask, server, executor: FakeExecutor, notes) -> None:
    senders = [ask({**PROMPT, "stream": True}) for _ in range(3)]
    ids = list(executor.enqueued)
    assert server.is_ready()
    executor.ready = False
    executor.push(*[Response.of_error(i, EngineUnavailable("a rank died")) for i in ids])
    server._watch.look()
    server._watch.look()
    assert not server.is_ready() and pb.unloaded == ["llm"] and executor.is_shut_down
    assert (notes / "llm").read_text() == "its ranks are dead or silent\n"
    for sender in senders:
        assert sender.finished.wait(LONG) and sender.error.code() == pb.TritonError.UNAVAILABLE
    assert ask(PROMPT).error.code() == pb.TritonError.UNAVAILABLE


@pytest.mark.parametrize("when", ["requests end", "the engine ends"])
def test_an_engine_that_ends_while_the_model_is_unloaded_is_no_loss(
    server: BackendServer, executor: FakeExecutor, notes: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The watching thread may look at any moment; to ask the server for an unload then has aborted it."""

    def lose(*arguments: object) -> bool:
        executor.ready = False
        server._watch.look()
        return True

    if when == "requests end":
        monkeypatch.setattr(server._items, "wait_until_empty", lose)
    else:
        monkeypatch.setattr(executor, "shutdown", lambda: (FakeExecutor.shutdown(executor), lose()))
    server.close()
    assert not pb.unloaded and not list(notes.iterdir())


def test_without_a_supervisor_a_dead_engine_may_come_back(ask, server, executor, monkeypatch) -> None:
    monkeypatch.delenv(RUN_DIRECTORY, raising=False)
    executor.ready = False
    server._watch.look()
    assert not server.is_ready() and not pb.unloaded and not executor.is_shut_down
    executor.ready = True
    assert server.is_ready()
    finish(executor, ask(PROMPT))


def test_closing_answers_what_is_left(ask, server: BackendServer, executor: FakeExecutor) -> None:
    sender = ask(PROMPT)
    server.close(drain_seconds=0.0)
    assert sender.error.code() == pb.TritonError.UNAVAILABLE
    late = ask(PROMPT)
    assert late.error.code() == pb.TritonError.UNAVAILABLE
