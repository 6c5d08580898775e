"""Requests from their acceptance to their final response, as tritonserver drives the backend."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path

import fake_pb_utils as pb
import pytest
from calls import until
from fake_executor import FakeExecutor, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from played_backend import LONG, PROMPT, counted, finish

from inflight.errors import (
    EngineUnavailable,
    QueueFull,
    RequestCancelled,
    StepFailed,
)
from inflight.guided_decoding import WhiteSpace
from inflight.metric_families import OUTCOMES
from inflight.result import FinishReason, Response, Result
from inflight.server.backend_server import BackendServer
from inflight.server.tensors.dialects import LLM


def test_a_request_comes_and_goes(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "exclude_input_in_output": True})
    assert executor.last.input_token_ids == list(b"hi")
    assert finish(executor, sender).text == "ok"


def test_the_prompt_is_part_of_the_answer_unless_excluded(ask, executor: FakeExecutor) -> None:
    assert finish(executor, ask(PROMPT)).text == "hiok"
    assert finish(executor, ask({"input_ids": [104, 105], "max_tokens": 8})).text == "hiok"
    assert finish(executor, ask({**PROMPT, "stream": True})).text == "ok"


UNENFORCED = '{"type": "object", "properties": {"a/b": {"type": "string", "pattern": "(?=a)b"}}}'


def test_what_a_schema_says_and_is_not_enforced_is_named_with_the_last_response(ask, executor: FakeExecutor) -> None:
    guided = {**PROMPT, "guided_decoding_guide_type": "json_schema", "guided_decoding_guide": UNENFORCED, "end_id": 1}
    assert "pattern of /properties/a~1b" in str(ask(guided).error)
    sender = ask({**guided, "guided_decoding_strict": False, "stream": True})
    executor.push(tokens(executor.last.request_id, [97]))
    until(lambda: len(sender.responses) == 1)
    executor.push(tokens(executor.last.request_id, [98], FinishReason.LENGTH))
    assert sender.finished.wait(LONG)
    first, last = sender.responses
    assert "guided_decoding_not_enforced" not in first.names()
    assert last["guided_decoding_not_enforced"] == "#/properties/a~1b pattern"


def test_white_space_of_json_is_the_clients_choice(ask, executor: FakeExecutor) -> None:
    guided = {**PROMPT, "guided_decoding_guide_type": "json", "end_id": 1}
    for asked, used in (("", WhiteSpace.DUMPS), ("compact", WhiteSpace.COMPACT), ("free", WhiteSpace.FREE)):
        sender = ask({**guided, "guided_decoding_white_space": asked})
        assert executor.last.guided_decoding_params.white_space is used
        finish(executor, sender)
    sender = ask({**guided, "guided_decoding_white_space": "none"})
    assert "guided_decoding_white_space must be one of dumps, compact, free" in str(sender.error)


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


@pytest.mark.parametrize("ends_well", [True, False])
def test_an_id_is_free_when_the_final_response_is_sent(ask, server, executor: FakeExecutor, ends_well: bool) -> None:
    """So that a client that has it can use the id again."""
    sender = ask(PROMPT, request_id="same")
    send, found = sender.send, []

    def look(*arguments, **options) -> None:
        found.append(server._items.with_triton_id("same"))
        send(*arguments, **options)

    sender.send = look
    request_id = executor.last.request_id
    error = Response.of_error(request_id, StepFailed("the step failed"))
    executor.push(tokens(request_id, [33], FinishReason.LENGTH) if ends_well else error)
    assert sender.finished.wait(LONG)
    assert found == [[]]


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
    until(lambda: executor.cancelled == [request_id], "the engine is told")
    executor.push(tokens(request_id, [], FinishReason.CANCELLED))
    finish(executor, again)


def test_a_stop_string_ends_one_sequence_in_the_engine_too(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "stop_words": ["b"], "num_return_sequences": 2, "exclude_input_in_output": True})
    request_id = executor.last.request_id

    def say(index: int, text: bytes, **end: object) -> None:
        result = Result(output_token_ids=list(text), sequence_index=index, **end)
        executor.push(Response(request_id=request_id, result=result))

    say(1, b"ab")
    until(lambda: executor.cancelled_sequences, "the engine is told")
    say(1, b"c")
    say(0, b"xy")
    say(1, b"", finish_reason=FinishReason.CANCELLED, is_sequence_final=True)
    say(0, b"b", finish_reason=FinishReason.LENGTH, is_sequence_final=True, is_final=True)
    assert sender.finished.wait(LONG)
    assert executor.cancelled_sequences == [(request_id, 1)] and executor.cancelled == []
    answers = {each["sequence_index"][0]: (each["text_output"], each["finish_reason"]) for each in sender.responses}
    assert answers == {0: ("xy", "stop"), 1: ("a", "stop")}


def test_what_a_stop_string_ended_was_completed_whatever_comes_after(ask, server, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "stop_words": ["b"]})
    request_id = executor.last.request_id
    executor.push(tokens(request_id, list(b"ab")))
    assert sender.finished.wait(LONG)
    executor.push(Response.of_error(request_id, EngineUnavailable("the ranks died")))
    server.close()
    assert counted("completed") == 1 and sum(counted(each) for each in OUTCOMES.series) == 1


def test_tokens_before_an_error_are_not_lost(ask, executor: FakeExecutor) -> None:
    sender = ask({**PROMPT, "stream": True})
    request_id = executor.last.request_id
    executor.push(tokens(request_id, [97]), Response.of_error(request_id, StepFailed("the step failed")))
    assert sender.finished.wait(LONG)
    assert sender.text == "a" and sender.error.message() == "the step failed [INTERNAL]"


ANYTHING = st.dictionaries(
    st.sampled_from([tensor.name for tensor in LLM.inputs]),
    st.one_of(st.binary(max_size=8), st.integers(-(2**31), 2**31 - 1), st.floats(), st.booleans(), st.just([])),
    max_size=6,
)


@given(inputs=ANYTHING, parameters=st.one_of(st.just("{}"), st.text(max_size=10)), request_id=st.text(max_size=5))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_request_makes_execute_raise(ask, executor: FakeExecutor, inputs, parameters, request_id) -> None:
    """Also values of types that tritonserver would refuse. The fixture checks that each got one final response."""
    numbers = ("seed", "lora_task_id")
    inputs = {name: value for name, value in inputs.items() if not isinstance(value, bytes) or name not in numbers}
    for name in numbers:
        if isinstance(inputs.get(name), int | float) and not 0 <= inputs[name] < 2**64:
            del inputs[name]
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
