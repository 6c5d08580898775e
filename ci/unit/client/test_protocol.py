"""Statuses to exceptions and tensors to chunks, as servers really word and shape them.

pytest ci/unit/client/test_protocol.py
"""

from __future__ import annotations

import numpy as np
import pytest

from inflight_client import (
    Cancelled,
    ClientError,
    ConnectError,
    ConnectionLost,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Reply,
    RequestRefused,
    ServerFailure,
    Unavailable,
)
from inflight_client._exceptions import error_from_message, error_from_status
from inflight_client._grpc import _decode, _encode
from inflight_client._protocol import chunk_from_reply, generation_call
from inflight_client._transport import strings
from inflight_client._types import CompletionBuilder, TokenLogProb


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        ("INVALID_ARGUMENT", "top_p must be in (0, 1]", InvalidRequest),
        ("ALREADY_EXISTS", "request id 7 is already in flight", InvalidRequest),
        ("NOT_FOUND", "no such model", ModelNotFound),
        ("UNAVAILABLE", "the ranks are starting", Unavailable),
        ("NOT_FOUND", "Request for unknown model: 'llm' has no available versions", Unavailable),
        ("UNAVAILABLE", "Exceeds maximum queue size", RequestRefused),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: UNKNOWN: Connection refused", ConnectError),
        ("UNAVAILABLE", "errors resolving http://localhost:8000: Misformatted domain name", ConnectError),
        ("UNAVAILABLE", "Socket closed", ConnectionLost),
        ("CANCELLED", "Request was cancelled", Cancelled),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", DeadlineExceeded),
        ("INTERNAL", "the forward pass failed", ServerFailure),
        ("UNKNOWN", "anything", ServerFailure),
    ],
)
def test_each_status_has_its_exception(code: str, message: str, kind: type[ClientError]) -> None:
    error = error_from_status(code, message, request_id="9")
    assert type(error) is kind
    assert (error.code, error.request_id) == (code, "9")
    assert str(error) == error.message


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        ("Request for unknown model: 'x' is not found", "NOT_FOUND", ModelNotFound),
        ("Request for unknown model: 'llm' version 9 is not found", "NOT_FOUND", ModelNotFound),
        ("Request for unknown model: 'llm' has no available versions", "NOT_FOUND", Unavailable),
        ("[request id: 7] Exceeds maximum queue size", "UNAVAILABLE", RequestRefused),
        (
            "Server is stopping, scheduler for model has stopped accepting new inference requests",
            "UNAVAILABLE",
            Unavailable,
        ),
        ("[request id: 7] expected 1 inputs but got 0 inputs for model 'llm'", "INVALID_ARGUMENT", InvalidRequest),
        ("unexpected inference input 'nope' for model 'llm'", "INVALID_ARGUMENT", InvalidRequest),
        (
            "[request id: 7] inference input 'top_k' data-type is 'FP32', but model 'llm' expects 'INT32'",
            "INVALID_ARGUMENT",
            InvalidRequest,
        ),
        (
            "[request id: 7] unexpected shape for input 'top_k' for model 'llm'. Expected [1], got [3]. ",
            "INVALID_ARGUMENT",
            InvalidRequest,
        ),
        ("Request was cancelled", "CANCELLED", Cancelled),
        ("Stub process 'llm_0_0' is not healthy.", "UNAVAILABLE", Unavailable),
        ("no kernel for this device [CUDA]", "UNKNOWN", ServerFailure),
    ],
)
def test_sentences_without_a_code_are_understood_by_their_words(
    message: str, code: str, kind: type[ClientError]
) -> None:
    error = error_from_message(message, request_id="9")
    assert type(error) is kind
    assert (error.code, error.request_id, str(error)) == (code, "9", message)


@pytest.mark.parametrize(
    ("message", "kind", "sentence"),
    [
        ("'[INTERNAL]' is no value of top_k [INVALID_ARGUMENT]", InvalidRequest, "'[INTERNAL]' is no value of top_k"),
        ("no model says 'unknown model' [INVALID_ARGUMENT]", InvalidRequest, "no model says 'unknown model'"),
        ("the ranks had their connection reset [UNAVAILABLE]", Unavailable, "the ranks had their connection reset"),
        ("two\nlines [INTERNAL]", ServerFailure, "two\nlines"),
    ],
)
def test_the_code_behind_a_sentence_wins_over_its_words(message: str, kind: type[ClientError], sentence: str) -> None:
    error = error_from_message(message)
    assert type(error) is kind and str(error) == sentence


def test_a_deadline_is_also_a_timeout_error() -> None:
    with pytest.raises(TimeoutError):
        raise error_from_status("DEADLINE_EXCEEDED", "Deadline Exceeded")


def test_an_error_without_words_still_says_something() -> None:
    assert "DATA_LOSS" in str(error_from_status("DATA_LOSS", ""))


def test_a_chunk_takes_only_as_many_ids_as_the_length_says() -> None:
    outputs = {"output_ids": np.array([[4, 5, 2, 2]], np.int32), "sequence_length": np.array([2], np.int32)}
    chunk = chunk_from_reply(Reply(outputs=outputs))
    assert chunk is not None
    assert chunk.token_ids == (4, 5)
    assert chunk.num_output_tokens == 2


def test_counts_come_from_their_own_tensors_where_there_are_some() -> None:
    outputs = {"text_output": strings(("x",)), "num_output_tokens": np.array([3], np.int32)}
    chunk = chunk_from_reply(Reply(outputs={**outputs, "num_input_tokens": np.array([9], np.int32)}))
    assert chunk is not None
    assert (chunk.num_input_tokens, chunk.num_output_tokens) == (9, 3)


def test_numbers_of_beams_are_one_row() -> None:
    beams = {"beam_width": 4, "beam_width_array": [4, 2]}
    call = generation_call("x", beams, model="llm", stream=False, timeout=None, request_id=None)
    assert call.inputs["beam_width_array"].tolist() == [4, 2] and call.inputs["beam_width_array"].dtype == np.int32


def test_drafts_are_one_row_of_token_ids() -> None:
    call = generation_call(
        "x", {"draft_input_ids": (3, 4), "max_draft_len": 8}, model="llm", stream=False, timeout=None, request_id=None
    )
    assert call.inputs["draft_input_ids"].tolist() == [3, 4] and call.inputs["draft_input_ids"].dtype == np.int32
    assert call.inputs["max_draft_len"].tolist() == [8]
    for wrong in ("34", 5, [1.5]):
        with pytest.raises(InvalidRequest, match="draft_input_ids must be"):
            generation_call("x", {"draft_input_ids": wrong}, model="llm", stream=False, timeout=None, request_id=None)


def test_logits_of_drafts_are_a_matrix() -> None:
    options = {"draft_input_ids": [3], "draft_logits": [[0.5, 1.5]], "draft_acceptance_threshold": 0.25}
    call = generation_call("x", options, model="llm", stream=False, timeout=None, request_id=None)
    assert call.inputs["draft_logits"].tolist() == [[0.5, 1.5]] and call.inputs["draft_logits"].dtype == np.float32
    assert call.inputs["draft_acceptance_threshold"].tolist() == [0.25]
    with pytest.raises(InvalidRequest, match="draft_logits must have two dimensions"):
        generation_call("x", {"draft_logits": [0.5]}, model="llm", stream=False, timeout=None, request_id=None)


def test_counts_of_drafts_are_those_of_the_last_chunk() -> None:
    outputs = {"total_draft_tokens": np.array([9], np.int32), "total_accepted_draft_tokens": np.array([7], np.int32)}
    builder = CompletionBuilder()
    for reply in ({"text_output": strings(("a",))}, {"text_output": strings(("b",)), **outputs}):
        chunk = chunk_from_reply(Reply(outputs=reply))
        assert chunk is not None
        builder.add(chunk)
    completion = builder.build()
    assert (completion.total_draft_tokens, completion.total_accepted_draft_tokens) == (9, 7)


def test_alternatives_become_pairs_for_each_token() -> None:
    outputs = {
        "output_ids": np.array([[4, 5]], np.int32),
        "sequence_index": np.array([3], np.int32),
        "top_token_ids": np.array([[[4, 1], [2, 5]]], np.int32),
        "top_log_probs": np.array([[[-0.5, -1.0], [-0.25, -2.0]]], np.float32),
        "prompt_log_probs": np.array([-3.0], np.float32),
        "prompt_top_token_ids": np.array([[9, 8]], np.int32),
        "prompt_top_log_probs": np.array([[-0.5, -1.0]], np.float32),
    }
    chunk = chunk_from_reply(Reply(outputs=outputs))
    assert chunk is not None and chunk.sequence_index == 3
    assert chunk.top_log_probs == (
        (TokenLogProb(4, -0.5), TokenLogProb(1, -1.0)),
        (TokenLogProb(2, -0.25), TokenLogProb(5, -2.0)),
    )
    assert chunk.prompt_log_probs == (-3.0,)
    assert chunk.prompt_top_log_probs == ((TokenLogProb(9, -0.5), TokenLogProb(8, -1.0)),)


def test_empty_tensors_of_alternatives_are_none_at_all() -> None:
    empty = {"top_token_ids": np.zeros((1, 0, 2), np.int32), "top_log_probs": np.zeros((1, 0, 2), np.float32)}
    chunk = chunk_from_reply(Reply(outputs=empty))
    assert chunk is not None and chunk.top_log_probs == ()


def test_embeddings_are_sent_in_the_types_of_their_tensors() -> None:
    options = {"prompt_embedding_table": [[1, 2.5], [3, 1e9]], "prompt_table_extra_ids": [2**64 - 1]}
    inputs = generation_call("go", options, model="llm", stream=True, timeout=None, request_id=None).inputs
    assert inputs["prompt_embedding_table"].dtype == np.float16
    assert inputs["prompt_embedding_table"].tolist() == [[1, 2.5], [3, float("inf")]]
    assert inputs["prompt_table_extra_ids"].tolist() == [2**64 - 1]
    rows = np.ones((3, 2))
    inputs = generation_call(rows, {}, model="llm", stream=True, timeout=None, request_id=None).inputs
    assert inputs["prompt_embeds"].dtype == np.float32 and inputs["prompt_embeds"].shape == (3, 2)
    assert "text_input" not in inputs and "input_ids" not in inputs
    ids = generation_call(np.array([1, 2]), {}, model="llm", stream=True, timeout=None, request_id=None).inputs
    assert ids["input_ids"].tolist() == [1, 2]
    with pytest.raises(InvalidRequest, match="must have two dimensions"):
        generation_call(
            "go", {"prompt_embedding_table": [1.0]}, model="llm", stream=True, timeout=None, request_id=None
        )


def test_bytes_that_are_not_text_do_not_break_the_client() -> None:
    outputs = {"text_output": np.array([b"caf\xc3"], np.object_)}
    chunk = chunk_from_reply(Reply(outputs=outputs))
    assert chunk is not None and chunk.text == "caf\ufffd"


def test_what_is_encoded_is_what_a_server_decodes() -> None:
    from tritonclient.grpc import service_pb2

    options = {"stop_words": ["é", ""], "seed": 2**63, "temperature": 0.25, "bad_words": []}
    call = generation_call("hello", options, model="llm", stream=True, timeout=None, request_id="5")
    request = _encode(call)
    assert (request.model_name, request.id) == ("llm", "5")
    assert request.parameters["triton_enable_empty_final_response"].bool_param

    answer = service_pb2.ModelStreamInferResponse()
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        answer.infer_response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        answer.infer_response.raw_output_contents.append(raw)
    answer.infer_response.parameters["triton_final_response"].bool_param = True
    reply = _decode(answer)
    assert reply.final
    assert set(reply.outputs) == set(call.inputs)
    for name, array in call.inputs.items():
        np.testing.assert_array_equal(reply.outputs[name], array)
