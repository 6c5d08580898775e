"""Requests that are split between engines: what tensors and parameters say, and what their answers hold."""

from __future__ import annotations

import fake_pb_utils as pb
import numpy as np
import pytest
from fake_executor import FakeExecutor
from played_backend import LONG

from inflight.context_phase import ContextPhaseParams, RequestType
from inflight.result import FinishReason, Response, Result
from inflight.server.backend_server import BackendServer
from inflight.server.tensors.trtllm import ENSEMBLE

PROMPT = {"text_input": "AB", "max_tokens": 4}
PARAMS = ContextPhaseParams(req_id=3, first_gen_tokens=[97], opaque_state=b"where it is")
CONTEXT = '{"request_type": "context_only"}'
GENERATION = '{"request_type": "generation_only"}'


def first_token(executor: FakeExecutor, params: ContextPhaseParams | None) -> Response:
    result = Result(
        output_token_ids=[97],
        finish_reason=FinishReason.LENGTH,
        is_final=True,
        is_sequence_final=True,
        context_phase_params=params,
    )
    return Response(request_id=executor.last.request_id, result=result)


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_only_request_is_answered_with_what_another_engine_needs(
    ask, executor: FakeExecutor, stream: bool
) -> None:
    sender = ask({**PROMPT, "stream": stream}, parameters=CONTEXT)
    assert executor.last.request_type is RequestType.CONTEXT_ONLY
    executor.push(first_token(executor, PARAMS))
    assert sender.finished.wait(LONG)
    params = np.array(sender.responses[-1]["context_phase_params"], np.uint8)
    assert ContextPhaseParams.deserialize(params.tobytes()) == PARAMS
    sender = ask({**PROMPT, "context_phase_params": params}, parameters=GENERATION)
    assert executor.last.request_type is RequestType.GENERATION_ONLY
    assert executor.last.context_phase_params == PARAMS
    executor.push(first_token(executor, None))
    assert sender.finished.wait(LONG)
    assert "context_phase_params" not in sender.responses[-1].names()


def test_without_more_to_generate_nothing_is_handed_over(ask, executor: FakeExecutor) -> None:
    sender = ask(PROMPT, parameters=CONTEXT)
    executor.push(first_token(executor, None))
    assert sender.finished.wait(LONG) and sender.error is None
    assert "context_phase_params" not in sender.responses[-1].names()


@pytest.mark.parametrize(
    ("inputs", "parameters", "sentence"),
    [
        ({}, GENERATION, "belong together"),
        ({"context_phase_params": np.zeros(9, np.uint8)}, GENERATION, "must be the bytes"),
        ({"context_phase_params": np.frombuffer(PARAMS.serialize(), np.uint8)}, "{}", "belong together"),
        ({"context_phase_params": np.zeros(2**17, np.uint8)}, GENERATION, "more than 65536"),
        ({}, '{"request_type": "some"}', "must be one of"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    ask, executor: FakeExecutor, inputs: dict[str, object], parameters: str, sentence: str
) -> None:
    sender = ask({**PROMPT, **inputs}, parameters=parameters)
    assert sender.finished.wait(LONG)
    assert sender.error.code() == pb.TritonError.INVALID_ARG and sentence in sender.error.message()
    assert not executor.enqueued


def test_a_model_that_cannot_answer_it_refuses_it(
    ask, server: BackendServer, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_dialect", ENSEMBLE)
    inputs = {"text_input": np.array([[b"AB"]], np.object_), "max_tokens": np.array([[4]], np.int32)}
    sender = ask(inputs, parameters=CONTEXT)
    assert sender.finished.wait(LONG) and "use llm or tensorrt_llm" in sender.error.message()
