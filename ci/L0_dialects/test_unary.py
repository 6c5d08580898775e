"""Models that are not decoupled: one response to each request, over every protocol."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from raw_stream import tensors
from server_process import ServerProcess

from inflight_client import Client

from .conftest import GOLDEN

PROMPT = {"input_ids": GOLDEN["prompt_ids"], "max_tokens": 8, "exclude_input_in_output": True}


def infer(server: ServerProcess, inputs: dict[str, Any], model: str = "llm_unary", **more: Any) -> Any:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return client.infer(model, tensors(inputs), client_timeout=180, **more)


def test_infer_over_grpc(server: ServerProcess) -> None:
    answer = infer(server, PROMPT)
    assert answer.as_numpy("output_ids").tolist() == [GOLDEN["token_ids"][:8]]
    assert answer.as_numpy("finish_reason").tolist() == [b"length"]


def test_infer_over_http(server: ServerProcess) -> None:
    ids = httpclient.InferInput("input_ids", [len(GOLDEN["prompt_ids"])], "INT32")
    ids.set_data_from_numpy(np.array(GOLDEN["prompt_ids"], np.int32))
    length = httpclient.InferInput("max_tokens", [1], "INT32")
    length.set_data_from_numpy(np.array([8], np.int32))
    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        answer = client.infer("llm_unary", [ids, length])
    assert answer.as_numpy("output_ids").tolist() == [GOLDEN["prompt_ids"] + GOLDEN["token_ids"][:8]]


def generate(server: ServerProcess, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{server.http_url}/v2/models/llm_unary/generate", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_generate_with_several_sequences(server: ServerProcess) -> None:
    body = {"text_input": "Once", "max_tokens": 6, "num_return_sequences": 3, "temperature": 1.0, "seed": 4}
    status, answer = generate(server, {**body, "exclude_input_in_output": True})
    with Client(server.grpc_url) as client:
        options = {key: value for key, value in body.items() if key != "text_input"}
        expected = [sequence.text for sequence in client.generate("Once", **options).sequences]  # type: ignore[arg-type]
    assert status == 200 and answer["text_output"] == expected


@pytest.mark.parametrize(
    ("more", "words"),
    [({"stream": True}, "Streaming is only supported in decoupled mode."), ({"top_p": 7.0}, "top_p must be")],
)
def test_errors(server: ServerProcess, more: dict[str, Any], words: str) -> None:
    status, answer = generate(server, {"text_input": "Once", "max_tokens": 6, **more})
    assert status == 400 and words in answer["error"]
    with pytest.raises(grpcclient.InferenceServerException, match=words):
        infer(server, {"text_input": "Once", "max_tokens": 6, **more})


def test_many_at_once_share_the_batch(server: ServerProcess) -> None:
    """The model has one instance: if it served one request after the other, one that waits for another would never
    end."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: infer(server, {**PROMPT, "max_tokens": 32}), range(16)))
    assert {tuple(answer.as_numpy("output_ids")[0]) for answer in answers} == {tuple(GOLDEN["token_ids"][:32])}


def test_a_stop_is_answered_and_ends_the_request(server: ServerProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = {**PROMPT, "max_tokens": 2000, "end_id": -1}
        running = pool.submit(infer, server, long, request_id="long")
        while not running.done():
            try:
                infer(server, {"stop": True}, request_id="long")
            except grpcclient.InferenceServerException as error:
                assert "not active" in str(error), error
        try:
            assert running.result().as_numpy("finish_reason").tolist() == [b"cancelled"]
        except grpcclient.InferenceServerException as error:
            assert "has been stopped" in str(error), "it had not started"


def test_megabytes_come_in_the_one_response(server: ServerProcess) -> None:
    prompt = GOLDEN["prompt_ids"] * 40
    answer = infer(
        server, {"input_ids": prompt, "max_tokens": 1}, outputs=[grpcclient.InferRequestedOutput("context_logits")]
    )
    logits = answer.as_numpy("context_logits")
    assert logits.shape[0] == len(prompt) and logits.nbytes > 2**20
    assert [output.name for output in answer.get_response().outputs] == ["context_logits"]
