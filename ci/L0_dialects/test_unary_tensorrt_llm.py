"""tensorrtllm_backend's models without streams, as its clients use them with `infer`."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from raw_stream import tensors
from server_process import ServerProcess

from .conftest import GOLDEN, number
from .test_tensorrt_llm import IDS, TOKENS, flag, stop_inputs, text_inputs, token_inputs


def infer(server: ServerProcess, model: str, inputs: dict[str, np.ndarray], **more: str) -> grpcclient.InferResult:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return client.infer(model, tensors(inputs), client_timeout=180, **more)


def test_token_ids(second_server: ServerProcess) -> None:
    answer = infer(second_server, "tensorrt_llm", token_inputs(6))
    assert answer.as_numpy("output_ids").tolist() == [[IDS + TOKENS[:6]]]
    assert answer.as_numpy("sequence_length").tolist() == [[len(IDS) + 6]]


def test_all_sequences_in_one_response(second_server: ServerProcess) -> None:
    more = {"num_return_sequences": number(3, np.int32, 1, 1), "seed": number(3, np.uint64, 1, 1)}
    inputs = token_inputs(6, exclude_input_in_output=flag(), **more)
    inputs["runtime_top_k"] = number(20, np.int32, 1, 1)
    assert infer(second_server, "tensorrt_llm", inputs).as_numpy("output_ids").shape == (1, 3, 6)


def test_text_over_grpc_and_generate(second_server: ServerProcess) -> None:
    answer = infer(second_server, "ensemble", text_inputs(6, exclude_input_in_output=flag()))
    whole = answer.as_numpy("text_output").tolist()
    body = {"text_input": GOLDEN["prompt"], "max_tokens": 6, "bad_words": "", "stop_words": ""}
    url = f"{second_server.http_url}/v2/models/tensorrt_llm_bls/generate"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=180) as response:
        assert [json.load(response)["text_output"].encode()] == [GOLDEN["prompt"].encode() + whole[0]]


def test_a_stream_is_refused_in_tensorrt_llms_words(second_server: ServerProcess) -> None:
    with pytest.raises(grpcclient.InferenceServerException, match="Streaming is only supported in decoupled mode"):
        infer(second_server, "tensorrt_llm", token_inputs(6, streaming=flag()))


def test_a_stop_of_nothing_succeeds(second_server: ServerProcess) -> None:
    assert not infer(second_server, "tensorrt_llm", stop_inputs(), request_id="nothing").get_response().outputs
