"""vllm_model over an engine that the test plays: what clients of vllm_backend compare and look for."""

from __future__ import annotations

import json
from typing import Any

import fake_pb_utils as pb
import pytest
from fake_executor import FakeExecutor, tokens
from fake_tokenizer import byte_tokenizer
from played_backend import LONG, finish

from inflight.errors import EngineUnavailable
from inflight.result import FinishReason, Response
from inflight.server.backend_server import BackendServer
from inflight.server.tensors.dialects import VLLM_MODEL

END_ID = byte_tokenizer().end_ids[0]
pytestmark = pytest.mark.parametrize("server", [VLLM_MODEL], indirect=True)


def test_what_is_wrong_with_a_request_is_a_sentence_alone(ask: Any, executor: FakeExecutor) -> None:
    sender = ask({"text_input": "hi", "stream": True, "exclude_input_in_output": False})
    sentence = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    assert sender.error.message() == sentence
    assert sender.error.code() == pb.TritonError.INVALID_ARG
    sender = ask({"text_input": "hi"})
    executor.push(Response.of_error(executor.last.request_id, EngineUnavailable("the engine is gone")))
    assert sender.finished.wait(LONG)
    assert sender.error.message() == "the engine is gone [UNAVAILABLE]", "who may try again is told"


def test_special_tokens_have_text_if_vllms_clients_ask_for_it(ask: Any, executor: FakeExecutor) -> None:
    for skips, text in ((True, "ab"), (False, "a<end>b")):
        said = json.dumps({"skip_special_tokens": skips, "ignore_eos": True})
        sender = ask({"text_input": "hi", "sampling_parameters": said, "exclude_input_in_output": True})
        assert finish(executor, sender, [97, END_ID, 98]).text == text
    said = json.dumps({"skip_special_tokens": False})
    sender = ask({"text_input": "hi", "sampling_parameters": said, "exclude_input_in_output": True})
    executor.push(tokens(executor.last.request_id, [97, END_ID], FinishReason.END_ID))
    assert sender.finished.wait(LONG) and sender.text == "a", "what ends the output is no part of it"


def test_cancellations_are_logged_in_vllm_backends_words(
    ask: Any, server: BackendServer, executor: FakeExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    sender = ask({"text_input": "hi"})
    sender.client_left = True
    with caplog.at_level("INFO", logger="inflight"):
        server._watch.look()
    assert caplog.messages == ["[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"]
    assert executor.cancelled == [executor.last.request_id]
    executor.push(tokens(executor.last.request_id, [], FinishReason.CANCELLED))
    assert sender.finished.wait(LONG)


def test_what_a_guide_leaves_out_is_named_beside_the_text(ask: Any, executor: FakeExecutor) -> None:
    guide = {"json": {"not": {"format": "ipv4"}}, "backend": "guidance"}
    said = {"structured_outputs": {**guide, "strict": False}}
    answer = finish(executor, ask({"text_input": "hi", "sampling_parameters": json.dumps(said)}))
    assert answer.responses[-1]["guided_decoding_not_enforced"] == "#/not format"
    for wrong, words in (({}, "format of /not"), ({"backend": "outlines", "strict": False}, "cannot choose")):
        said = {"structured_outputs": {**guide, **wrong}}
        assert words in str(ask({"text_input": "hi", "sampling_parameters": json.dumps(said)}).error.message())
