"""The backend as tritonserver drives it, over a fake pb_utils and an engine that the test plays."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import fake_pb_utils as pb
import fake_tokenizer
import pytest
from fake_executor import FakeExecutor, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.config import EngineConfig
from inflight.errors import (
    ConfigurationError,
    EngineUnavailable,
    QueueFull,
    RequestCancelled,
    RequestTimedOut,
    StepFailed,
)
from inflight.result import FinishReason, Response
from inflight.run_directory import LOST, RUN_DIRECTORY
from inflight.server.backend_server import BackendServer
from inflight.server.start import check_numpy
from inflight.server.tensors.dialects import LLM
from inflight.server.threads.metric_families import OUTCOMES

LONG = 30.0
"""Seconds after which a wait counts as a hang."""
PROMPT = {"text_input": "hi", "max_tokens": 8}


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


@pytest.fixture
def server(executor: FakeExecutor) -> BackendServer:
    pb.unloaded.clear()
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


def finish(executor: FakeExecutor, sender: pb.ResponseSender, text: bytes = b"ok") -> pb.ResponseSender:
    """Let the engine end its newest request."""
    executor.push(tokens(executor.last.request_id, list(text), FinishReason.LENGTH))
    assert sender.finished.wait(LONG)
    return sender


def test_a_request_comes_and_goes(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "exclude_input_in_output": True})
    assert executor.last.input_token_ids == list(b"hi")
    assert finish(executor, sender).text == "ok"


def test_the_prompt_is_part_of_the_answer_unless_excluded(ask, executor: FakeExecutor) -> None:
    assert finish(executor, ask(PROMPT)).text == "hiok"
    assert finish(executor, ask({"input_ids": [104, 105], "max_tokens": 8})).text == "hiok"
    assert finish(executor, ask({**PROMPT, "stream": True})).text == "ok"


def test_what_comes_together_is_sent_together(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "stream": True})
    request_id = executor.last.request_id
    executor.push(
        *[tokens(request_id, [97 + step]) for step in range(5)], tokens(request_id, [122], FinishReason.LENGTH)
    )
    assert sender.finished.wait(LONG)
    assert [response["text_output"] for response in sender.responses] == ["abcdez"]


def test_requests_do_not_mix(ask, executor: FakeExecutor) -> None:
    senders = {}
    for number in range(8):
        senders[number] = ask({"text_input": str(number), "max_tokens": 8, "stream": True})
    ids = list(executor.enqueued)
    for _ in range(3):
        executor.push(*[tokens(i, [48 + n]) for n, i in enumerate(ids)])
    executor.push(*[tokens(i, [33], FinishReason.LENGTH) for i in reversed(ids)])
    for number, sender in senders.items():
        assert sender.finished.wait(LONG) and sender.text == str(number) * 3 + "!"


@pytest.mark.parametrize(
    ("refusal", "code", "message"),
    [
        (QueueFull(), pb.TritonError.UNAVAILABLE, "Exceeds maximum queue size"),
        (EngineUnavailable("the ranks are being relaunched"), pb.TritonError.UNAVAILABLE, "the ranks are"),
        (ZeroDivisionError("secret prompt"), pb.TritonError.INTERNAL, "the request could not be read"),
    ],
)
def test_a_refusal_is_an_answer(ask, executor, refusal, code, message) -> None:
    executor.refusal = refusal
    sender = ask(PROMPT, request_id="a")
    assert sender.error.code() == code and sender.error.message().startswith(message)
    executor.refusal = None
    finish(executor, ask(PROMPT, request_id="a"))


def test_a_bad_request_leaves_its_neighbours_alone(ask, executor: FakeExecutor) -> None:
    good = ask(PROMPT)
    good_id = executor.last.request_id
    for bad in (
        {},
        {"text_input": b"\xff", "max_tokens": 1},
        {**PROMPT, "max_tokens": 0},
        {"input_ids": [5, -1], "max_tokens": 1},
    ):
        sender = ask(bad)
        assert sender.error.code() == pb.TritonError.INVALID_ARG
    executor.push(tokens(good_id, [33], FinishReason.END_ID))
    assert good.finished.wait(LONG) and good.error is None


def test_a_live_id_is_refused_and_its_first_owner_unharmed(ask, executor: FakeExecutor) -> None:
    first = ask(PROMPT, request_id="same")
    second = ask(PROMPT, request_id="same")
    assert second.error.code() == pb.TritonError.ALREADY_EXISTS
    assert second.error.message() == "requestId same is already in progress, request is ignored. [ALREADY_EXISTS]"
    assert finish(executor, first).error is None
    finish(executor, ask(PROMPT, request_id="same"))


def test_empty_ids_are_everybodys(ask, executor: FakeExecutor) -> None:
    first, second = ask(PROMPT), ask(PROMPT)
    executor.push(*[tokens(i, [33], FinishReason.LENGTH) for i in list(executor.enqueued)])
    assert first.finished.wait(LONG) and second.finished.wait(LONG)
    assert first.error is None and second.error is None


def test_stop_ends_the_request_of_the_same_id(ask, executor: FakeExecutor) -> None:
    running = ask({**PROMPT, "stream": True}, request_id="7")
    request_id = executor.last.request_id
    stop = ask({"stop": True}, request_id="7")
    assert stop.responses == [] and stop.num_finals == 1
    assert executor.cancelled == [request_id]
    executor.push(tokens(request_id, [97], FinishReason.CANCELLED))
    assert running.finished.wait(LONG)
    assert running.text == "a" and running.responses[-1]["finish_reason"] == "cancelled"


def test_stop_of_a_queued_request_ends_it_with_an_error(ask, executor: FakeExecutor) -> None:
    queued = ask(PROMPT, request_id="7")
    ask({"stop": True}, request_id="7")
    executor.push(Response.of_error(executor.last.request_id, RequestCancelled("stopped")))
    assert queued.finished.wait(LONG)
    assert queued.error.code() == pb.TritonError.CANCELLED
    assert queued.error.message() == "request Id 7 has been stopped. Request is ignored. [CANCELLED]"


def test_stop_of_nothing_is_an_error(ask) -> None:
    nameless = ask({"stop": True})
    assert nameless.error.message() == "Cannot send stop request without specifying a request_id [INVALID_ARGUMENT]"
    unknown = ask({"stop": True}, request_id="gone\n")
    assert unknown.error.message() == (
        "Received stop request for requestId gone\\n but it's not active (might be completed already). "
        "[INVALID_ARGUMENT]"
    )


def test_a_client_that_leaves_frees_the_engine(ask, server: BackendServer, executor: FakeExecutor) -> None:
    leaving, staying = ask({**PROMPT, "stream": True}), ask({**PROMPT, "stream": True})
    left_id, stay_id = executor.enqueued
    leaving.client_left = True
    server._watch.look()
    server._watch.look()
    assert executor.cancelled == [left_id]
    executor.push(tokens(left_id, [97], FinishReason.CANCELLED), tokens(stay_id, [98], FinishReason.LENGTH))
    assert leaving.finished.wait(LONG) and staying.finished.wait(LONG)
    assert leaving.error.code() == pb.TritonError.CANCELLED and len(leaving.responses) == 1
    assert staying.text == "b"


def test_a_client_that_leaves_before_the_engine_knows_of_it_frees_the_engine(ask, server, executor, senders) -> None:
    enqueue = executor.enqueue_request

    def leave_first(request) -> None:
        senders_of_all = [item._reply._sender for item in server._items.snapshot()]
        senders_of_all[-1].client_left = True
        server._watch.look()
        enqueue(request)

    executor.enqueue_request = leave_first
    sender = ask(PROMPT)
    assert executor.cancelled == [executor.last.request_id]
    executor.push(tokens(executor.last.request_id, [], FinishReason.CANCELLED))
    assert sender.finished.wait(LONG) and sender.error.code() == pb.TritonError.CANCELLED


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


@pytest.mark.parametrize("ending", ["complete", "cancelled", "refused", "failed"])
def test_nothing_holds_on_to_a_request_that_has_its_final_response(server, executor, ending) -> None:
    """tritonserver cannot unload the model while a response sender lives: no thread may keep its last one until the
    next comes, nor a cycle keep it until it is collected."""
    request = pb.request({"max_tokens": 8} if ending == "refused" else {**PROMPT, "stream": True})
    released = threading.Event()
    weakref.finalize(request.sender, released.set)
    gc.disable()
    try:
        server.accept(request)
        server._tokenizing.join()
        if ending == "cancelled":
            request.sender.client_left = True
            server._watch.look()
        if ending == "failed":
            server._items.find(executor.last.request_id)._outputs[0]._detokenizer = None
        if ending != "refused":
            executor.push(tokens(executor.last.request_id, [33], FinishReason.LENGTH))
        assert request.sender.finished.wait(LONG)
        assert (request.sender.error is None) == (ending == "complete")
        del request
        assert released.wait(LONG)
    finally:
        gc.enable()
        server.close(drain_seconds=0.0)


def test_a_stop_string_frees_the_engine(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "stop_words": ["b"], "exclude_input_in_output": True}, request_id="x")
    request_id = executor.last.request_id
    executor.push(tokens(request_id, list(b"abc")))
    assert sender.finished.wait(LONG)
    assert sender.text == "a" and sender.responses[0]["finish_reason"] == "stop"
    again = ask(PROMPT, request_id="x")
    executor.push(tokens(request_id, [], FinishReason.CANCELLED))
    assert executor.cancelled == [request_id]
    finish(executor, again)


def test_what_a_stop_string_ended_was_completed_whatever_comes_after(ask, server, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "stop_words": ["b"]})
    request_id = executor.last.request_id
    executor.push(tokens(request_id, list(b"ab")))
    assert sender.finished.wait(LONG)
    executor.push(Response.of_error(request_id, EngineUnavailable("the ranks died")))
    server.close()
    assert counted("completed") == 1 and sum(counted(each) for each in OUTCOMES.series) == 1


@pytest.fixture
def notes(tmp_path: Path, monkeypatch) -> Path:
    """Where a supervisor looks for the models that were given up."""
    (tmp_path / LOST).mkdir()
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    return tmp_path / LOST


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


def test_numpy_2_is_refused_only_where_the_stub_cannot_read_with_it(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"\0numpy.core.multiarray\0")
    new.write_bytes(b"\0numpy._core\0")
    check_numpy("2.1.0", new)
    check_numpy("1.26.4", old)
    with pytest.raises(ConfigurationError, match="install numpy<2"):
        check_numpy("2.1.0", old)


def test_without_a_supervisor_a_dead_engine_may_come_back(ask, server, executor, monkeypatch) -> None:
    monkeypatch.delenv(RUN_DIRECTORY, raising=False)
    executor.ready = False
    server._watch.look()
    assert not server.is_ready() and not pb.unloaded and not executor.is_shut_down
    executor.ready = True
    assert server.is_ready()
    finish(executor, ask(PROMPT))


def test_tokens_before_an_error_are_not_lost(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "stream": True})
    request_id = executor.last.request_id
    executor.push(tokens(request_id, [97]), Response.of_error(request_id, StepFailed("the step failed")))
    assert sender.finished.wait(LONG)
    assert sender.text == "a" and sender.error.message() == "the step failed [INTERNAL]"


def test_closing_answers_what_is_left(ask, server: BackendServer, executor: FakeExecutor) -> None:
    sender = ask(PROMPT)
    server.close(drain_seconds=0.0)
    assert sender.error.code() == pb.TritonError.UNAVAILABLE
    late = ask(PROMPT)
    assert late.error.code() == pb.TritonError.UNAVAILABLE


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
        executor.push(tokens(broken_id, [], FinishReason.CANCELLED))
    server.close()
    assert broken.error.code() == pb.TritonError.INTERNAL and len(broken.responses) == 1 and not broken.misuse
    assert "canary" not in broken.error.message() + capsys.readouterr().err
    assert sound.text == "b"
    assert [counted(outcome) for outcome in ("failed", "completed")] == [1, 1]
    if finish is FinishReason.NOT_FINISHED:
        assert executor.cancelled == [broken_id]


def counted(outcome: str) -> float:
    return pb.MetricFamily.metrics["inflight_requests_total", outcome].value


def test_outcomes_reach_the_metrics(ask, server: BackendServer, executor: FakeExecutor) -> None:
    finish(executor, ask(PROMPT))
    ask({})
    executor.refusal = QueueFull()
    ask(PROMPT)
    server.close()
    assert [counted(outcome) for outcome in ("completed", "rejected", "queue_full")] == [1, 1, 1]


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


ANYTHING = st.dictionaries(
    st.sampled_from([tensor.name for tensor in LLM.inputs]),
    st.one_of(st.binary(max_size=8), st.integers(-(2**31), 2**31 - 1), st.floats(), st.booleans(), st.just([])),
    max_size=6,
)


@given(inputs=ANYTHING, parameters=st.one_of(st.just("{}"), st.text(max_size=10)), request_id=st.text(max_size=5))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_makes_execute_raise(ask, executor: FakeExecutor, inputs, parameters, request_id) -> None:
    """Also values of types that tritonserver would refuse. The fixture checks that each got one final response."""
    inputs = {name: value for name, value in inputs.items() if not isinstance(value, bytes) or name != "seed"}
    if isinstance(inputs.get("seed"), int | float) and not 0 <= inputs["seed"] < 2**64:
        del inputs["seed"]
    sender = ask(inputs, parameters=parameters, request_id=request_id)
    for unfinished in list(executor.enqueued):
        executor.push(tokens(unfinished, [33], FinishReason.LENGTH))
    assert sender.finished.wait(LONG)


def test_model_py_answers_through_the_server(monkeypatch, server, ask, executor: FakeExecutor) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "backend"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    import model

    instance = model.TritonPythonModel()
    instance.finalize()
    instance._server = server
    requests = [pb.request(PROMPT), pb.request({})]
    assert instance.execute(requests) is None and instance.is_ready()
    server._tokenizing.join()
    finish(executor, requests[0].sender)
    assert requests[1].sender.error.code() == pb.TritonError.INVALID_ARG
    instance.finalize()
    assert not instance.is_ready()
    monkeypatch.delitem(sys.modules, "model")
