"""When finalize() has returned nothing of the backend touches pb_utils any more, whatever went wrong before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import fake_pb_utils as pb
import fake_tokenizer
import pytest
from fake_executor import STATS, FakeExecutor, tokens

from inflight.config import EngineConfig
from inflight.result import FinishReason
from inflight.server.backend_server import BackendServer
from inflight.server.tensors.dialects import LLM
from inflight.server.threads import metrics_thread

LONG = 30.0
"""Seconds after which a wait counts as a hang."""
PROMPT = {"text_input": "hi", "max_tokens": 8, "stream": True}


class Backend:
    """A started server and its engine."""

    def __init__(self) -> None:
        self._others = set(threading.enumerate())
        self.executor = FakeExecutor()
        self.server = BackendServer(
            pb_utils=pb,
            executor=self.executor,
            tokenizer=fake_tokenizer.byte_tokenizer(),
            dialect=LLM,
            config=EngineConfig(cancellation_check_period_ms=1, stats_check_period_ms=1),
            model_name="llm",
            model_version="1",
            instance="llm_0_0",
        )
        self.server.start()

    def threads(self) -> list[threading.Thread]:
        """Its own that live."""
        return [thread for thread in threading.enumerate() if thread not in self._others]

    def ask(self) -> pb.ResponseSender:
        request = pb.request(PROMPT)
        self.server.accept(request)
        self.server._tokenizing.join()
        return request.sender


@pytest.fixture
def backend() -> Iterator[Backend]:
    pb.MetricFamily.metrics.clear()
    pb.Life.misuse.clear()
    yield Backend()
    pb.Life.is_over = False


def finalize(backend: Backend) -> None:
    """As model.py does; from here on everything that is touched is held against the backend."""
    try:
        backend.server.close(drain_seconds=0.0)
    finally:
        pb.Life.is_over = True


def all_the_rest(backend: Backend, *senders: pb.ResponseSender) -> None:
    """Whatever could still wake a thread up, and then the end of every thread."""
    for sender in senders:
        sender.client_left = True
    for request_id in list(backend.executor.enqueued):
        backend.executor.push(tokens(request_id, [97]))
    backend.executor.stats = STATS.to_json()
    for thread in backend.threads():
        thread.join(LONG)


def test_every_thread_has_ended(backend: Backend) -> None:
    senders = [backend.ask() for _ in range(3)]
    finalize(backend)
    assert not backend.threads()
    all_the_rest(backend, *senders)
    assert [sender.num_finals for sender in senders] == [1, 1, 1] and not pb.Life.misuse


def fail(*arguments: object) -> None:
    raise OSError("no more processes")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda backend: setattr(backend.executor, "shutdown", fail),
        lambda backend: setattr(backend.server._watch, "stop", fail),
        lambda backend: setattr(backend.server._items, "wait_until_empty", fail),
        lambda backend: setattr(backend.server._sending, "_on_end", fail),
        lambda backend: setattr(backend.executor, "await_responses", fail),
    ],
    ids=["the engine cannot be ended", "a thread cannot be", "drain", "a request cannot be counted", "no responses"],
)
def test_what_fails_on_the_way_leaves_no_thread_that_answers_or_measures(
    backend: Backend, spoil: Callable[[Backend], None]
) -> None:
    stop_watching, sender = backend.server._watch.stop, backend.ask()
    spoil(backend)
    try:
        finalize(backend)
    except OSError as error:
        assert str(error) == "no more processes"
    assert {thread.name for thread in backend.threads()} <= {"inflight-watch"}
    assert sender.num_finals == 1
    stop_watching()
    assert not pb.Life.misuse


def close_while_relaunching(backend: Backend, drain_seconds: float) -> threading.Thread:
    """close() on a thread of its own, once it waits for the requests in flight."""
    waits, wait = threading.Event(), backend.server._items.wait_until_empty

    def waiting(timeout: float) -> bool:
        waits.set()
        return wait(timeout)

    backend.server._items.wait_until_empty = waiting  # type: ignore[method-assign]
    closing = threading.Thread(target=backend.server.close, args=(drain_seconds,))
    closing.start()
    assert waits.wait(LONG), "it does not wait for them"
    return closing


def test_requests_that_wait_for_a_relaunch_are_finished_before_the_end(backend: Backend) -> None:
    backend.executor.ready, backend.executor.relaunching = False, True
    sender = backend.ask()
    closing = close_while_relaunching(backend, drain_seconds=LONG)
    backend.executor.ready, backend.executor.relaunching = True, False
    backend.executor.push(tokens(backend.executor.last.request_id, [33], FinishReason.LENGTH))
    closing.join(LONG)
    assert not backend.threads() and sender.num_finals == 1 and sender.error is None


def test_a_relaunch_that_does_not_succeed_in_time_ends_every_request_once(backend: Backend) -> None:
    backend.executor.ready, backend.executor.relaunching = False, True
    senders = [backend.ask() for _ in range(3)]
    closing = close_while_relaunching(backend, drain_seconds=0.01)
    closing.join(LONG)
    assert not backend.threads() and [sender.num_finals for sender in senders] == [1, 1, 1]
    assert all("shut down" in str(sender.error) for sender in senders)


@pytest.mark.parametrize("call", ["observe", "increment", "set"])
def test_a_metric_that_the_server_never_takes_is_the_last(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    entered, released = threading.Event(), threading.Event()
    monkeypatch.setattr(metrics_thread, "FINAL_WAIT_SECONDS", 0.01)
    real = getattr(pb.Metric, call)

    def hang(metric: pb.Metric, value: float) -> None:
        real(metric, value)
        entered.set()
        released.wait(LONG)

    monkeypatch.setattr(pb.Metric, call, hang)
    backend.executor.stats = STATS.to_json()
    sender = backend.ask()
    backend.executor.push(tokens(backend.executor.last.request_id, [33], FinishReason.LENGTH))
    assert sender.finished.wait(LONG) and entered.wait(LONG)
    finalize(backend)
    metrics = backend.server._metrics
    released.set()
    all_the_rest(backend)
    assert not backend.threads() and not pb.Life.misuse
    assert metrics._metrics and metrics._families, "to drop one is a call, too"


def test_series_belong_to_one_load(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server frees what two stubs have in common when the first of them goes."""
    finalize(backend)
    before = [(metric.family.name, *sorted(metric.labels.items())) for metric in pb.MetricFamily.metrics.values()]
    pb.Life.is_over = False
    monkeypatch.setattr("os.getpid", lambda: 4711)
    again = Backend()
    finalize(again)
    after = [(metric.family.name, *sorted(metric.labels.items())) for metric in pb.MetricFamily.metrics.values()]
    assert len(before) == len(after) > 0 and not set(before) & set(after)
