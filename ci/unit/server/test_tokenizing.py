"""Requests while they are tokenised: beside execute(), in two lines, and like any other request in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import fake_pb_utils as pb
import fake_tokenizer
import numpy as np
import pytest
from fake_executor import FakeExecutor, tokens

from inflight.config import EngineConfig
from inflight.prompt_tuning import EmbeddingTable
from inflight.result import FinishReason
from inflight.server.backend_server import BackendServer
from inflight.server.tensors.client_request import ClientRequest
from inflight.server.tensors.dialects import LLM
from inflight.server.threads.tokenizing_threads import MAX_SHORT_LENGTH, text_length

LONG = 30.0
"""Seconds after which a wait counts as a hang."""
LONG_TEXT = "x" * (MAX_SHORT_LENGTH + 1)
Ask = Callable[..., pb.ResponseSender]


class Gate:
    """Texts that begin with "x" wait in the tokenizer, once `close` was called, until `open` is."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self.entered = threading.Semaphore(0)
        self._encode = fake_tokenizer.byte_tokenizer().encode

    def encode(self, text: str) -> list[int]:
        if text.startswith("x"):
            self.entered.release()
            assert self._is_open.wait(LONG)
        return self._encode(text)

    def open(self) -> None:
        self._is_open.set()

    def wait(self) -> None:
        """Until a text has come to it."""
        assert self.entered.acquire(timeout=LONG)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(fake_tokenizer.byte_tokenizer(), "encode", gate.encode)
    return gate


@pytest.fixture
def executor() -> FakeExecutor:
    executor = FakeExecutor(max_seq_len=4 * MAX_SHORT_LENGTH)
    executor._replica_ready(executor.limits, executor.description, max_in_flight=4)
    return executor


@pytest.fixture
def server(executor: FakeExecutor, gate: Gate) -> Iterator[BackendServer]:
    pb.MetricFamily.metrics.clear()
    server = BackendServer(
        pb_utils=pb,
        executor=executor,
        tokenizer=fake_tokenizer.byte_tokenizer(),
        dialect=LLM,
        config=EngineConfig(cancellation_check_period_ms=3_600_000),
        model_name="llm",
        model_version="1",
        instance="llm_0_0",
    )
    server.start()
    yield server
    gate.open()
    server.close(drain_seconds=0.0)


@pytest.fixture
def ask(server: BackendServer, gate: Gate) -> Iterator[Ask]:
    """At the end each sender must have had one final response and no misuse."""
    senders: list[pb.ResponseSender] = []

    def ask(text: str, **more) -> pb.ResponseSender:
        request = pb.request({"text_input": text, "max_tokens": 8, "stream": True}, **more)
        senders.append(request.sender)
        server.accept(request)
        return request.sender

    yield ask
    gate.open()
    server.close(drain_seconds=0.0)
    assert [(sender.num_finals, sender.misuse) for sender in senders] == [(1, [])] * len(senders)


def stop(server: BackendServer, request_id: str) -> None:
    request = pb.request({"stop": True}, request_id=request_id)
    server.accept(request)
    assert request.sender.error is None and request.sender.num_finals == 1


def counted(outcome: str) -> float:
    return pb.MetricFamily.metrics[("inflight_requests_total", outcome)].value


def test_execute_waits_for_no_tokenizer_and_short_requests_wait_for_no_long_one(ask, gate, executor, server) -> None:
    ask(LONG_TEXT)
    gate.wait()
    short = ask("hi")
    server._tokenizing._short.items.join()
    assert executor.last.input_token_ids == list(b"hi")
    executor.push(tokens(executor.last.request_id, list(b"ok"), FinishReason.LENGTH))
    assert short.finished.wait(LONG) and short.text == "ok"
    gate.open()
    server._tokenizing.join()
    assert len(executor.last.input_token_ids) == len(LONG_TEXT)


def test_every_text_that_is_tokenised_makes_a_request_long() -> None:
    texts = {"stop_words": ["xx"], "bad_words": ["xxx"], "embedding_bias_words": ["xxxx"]}
    assert text_length(ClientRequest(text="x", **texts)) == 1 + 2 + 2 * 3 + 4


def test_megabytes_of_numbers_make_a_request_long() -> None:
    table = EmbeddingTable(dtype="float16", shape=(2**10, 2**11), data=bytes(2**22))
    weights = np.zeros((2, 2**20), np.float16)
    for fields in ({"prompt_embeds": table}, {"prompt_embedding_table": table}, {"lora_weights": weights}):
        assert text_length(ClientRequest(text="x", **fields)) > MAX_SHORT_LENGTH


def test_requests_of_one_length_reach_the_engine_in_the_order_in_which_they_came(ask, gate, executor, server) -> None:
    ask("x first")
    gate.wait()
    for text in ("second", "x third", "fourth"):
        ask(text)
    gate.open()
    server._tokenizing.join()
    assert [bytes(request.input_token_ids) for request in executor.enqueued.values()] == [
        b"x first",
        b"second",
        b"x third",
        b"fourth",
    ]


def test_a_stop_reaches_a_request_that_is_being_tokenised_or_waits_for_that(ask, gate, executor, server) -> None:
    tokenised, waiting = ask("x", request_id="a"), ask("y", request_id="b")
    gate.wait()
    stop(server, "a")
    stop(server, "b")
    gate.open()
    for sender, name in ((tokenised, "a"), (waiting, "b")):
        assert sender.finished.wait(LONG)
        assert sender.error.code() == pb.TritonError.CANCELLED
        assert sender.error.message() == f"request Id {name} has been stopped. Request is ignored. [CANCELLED]"
    assert not executor.enqueued


def test_a_stop_that_comes_while_the_engine_takes_a_request_reaches_the_engine(ask, gate, executor, server) -> None:
    enqueue = executor.enqueue_request

    def stop_first(request) -> None:
        stop(server, "a")
        enqueue(request)

    executor.enqueue_request = stop_first
    ask("y", request_id="a")
    server._tokenizing.join()
    assert executor.cancelled == [executor.last.request_id]


def test_a_client_that_leaves_while_its_text_is_tokenised_costs_the_engine_nothing(ask, gate, executor, server) -> None:
    leaving = ask("x")
    gate.wait()
    leaving.client_left = True
    server._watch.look()
    gate.open()
    assert leaving.finished.wait(LONG) and leaving.error.code() == pb.TritonError.CANCELLED
    server._tokenizing.join()
    assert not executor.enqueued and len(server._items) == 0


def test_an_id_is_taken_while_its_request_is_tokenised(ask, gate, executor, server) -> None:
    ask("x", request_id="same")
    gate.wait()
    assert ask("y", request_id="same").error.code() == pb.TritonError.ALREADY_EXISTS
    gate.open()
    server._tokenizing.join()
    assert executor.last.client_id == "same"


def test_requests_that_wait_for_the_tokenizer_count_as_waiting(ask, gate, executor, server) -> None:
    """Four places: two served, two waiting. The one that is in the tokenizer has left the line."""
    ask("x")
    gate.wait()
    waiting = [ask("y") for _ in range(4)]
    refused = ask("z")
    assert refused.error.message().startswith("Exceeds maximum queue size")
    assert not any(sender.num_finals for sender in waiting)


def test_time_spent_waiting_for_the_tokenizer_counts(ask, gate, executor, server) -> None:
    late = ask("x", parameters='{"allotted_time_ms": 1}')
    plenty = ask("y", parameters='{"allotted_time_ms": 3600000}')
    gate.wait()
    threading.Event().wait(0.002)
    gate.open()
    assert late.finished.wait(LONG)
    assert late.error.code() == pb.TritonError.UNAVAILABLE and "longer than the time" in late.error.message()
    server._tokenizing.join()
    assert plenty.num_finals == 0 and 0 < executor.last.allotted_time_ms <= 3_600_000


def test_closing_ends_what_is_tokenised_and_tokenises_no_more(ask, gate, executor, server, monkeypatch) -> None:
    senders = [ask("x"), ask("x y"), ask(LONG_TEXT)]
    gate.wait()
    gate.wait()
    stop_threads = server._tokenizing.stop

    def open_and_stop() -> None:
        gate.open()
        stop_threads()

    monkeypatch.setattr(server._tokenizing, "stop", open_and_stop)
    server.close(drain_seconds=0.0)
    assert [sender.error.code() for sender in senders] == [pb.TritonError.UNAVAILABLE] * 3
    assert not gate.entered.acquire(blocking=False)
    assert counted("unavailable") == 3
    monkeypatch.undo()
    assert ask("late").error.code() == pb.TritonError.UNAVAILABLE
