"""Several prompts in one request to tensorrtllm_backend's models, as its clients send them and read the answers."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from raw_stream import Answer, RawStream
from server_process import ServerProcess

from inflight.server.tensors.dialect import MAX_PROMPTS
from inflight_client import Client

from .test_tensorrt_llm import IDS, TOKENS, text_inputs, token_inputs
from .test_unary_tensorrt_llm import infer

SHORT = IDS[:3]


def batch(*requests: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The requests of one prompt each as one request, padded with -1."""
    widest = {name: np.max([request[name].shape for request in requests], axis=0) for name in requests[0]}
    return {
        name: np.concatenate(
            [
                np.pad(
                    request[name],
                    [(0, size - own) for size, own in zip(shape, request[name].shape, strict=True)],
                    **({} if request[name].dtype in (object, bool) else {"constant_values": -1}),
                )
                for request in requests
            ]
        )
        for name, shape in widest.items()
    }


def tokens_by_prompt(answer: Answer) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for response in answer.responses:
        length = int(response["sequence_length"][0, 0])
        found.setdefault(int(response["batch_index"][0, 0]), []).extend(response["output_ids"][0, 0, :length].tolist())
    return found


def two_lengths(streaming: bool) -> dict[str, np.ndarray]:
    flags = {"streaming": np.array([[streaming]]), "exclude_input_in_output": np.array([[True]])}
    return batch(token_inputs(12, **flags), token_inputs(5, SHORT, **flags), token_inputs(7, **flags))


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> dict[int, list[int]]:
    with Client(server.grpc_url) as client:
        short = client.generate(SHORT, max_tokens=5, end_id=-1)
    return {0: TOKENS[:12], 1: list(short.token_ids), 2: TOKENS[:7]}


@pytest.mark.parametrize("streaming", [False, True])
def test_each_prompt_has_its_own_tokens(wire: RawStream, expected: dict[int, list[int]], streaming: bool) -> None:
    answer = wire.ask(two_lengths(streaming), model="tensorrt_llm")
    assert tokens_by_prompt(answer) == expected and answer.num_finals == 1


def test_one_response_to_infer_has_a_row_for_each_prompt(
    second_server: ServerProcess, expected: dict[int, list[int]]
) -> None:
    answer = infer(second_server, "tensorrt_llm", two_lengths(False))
    assert answer.as_numpy("batch_index").tolist() == [[0], [1], [2]]
    assert answer.as_numpy("sequence_length").tolist() == [[12], [5], [7]]
    assert answer.as_numpy("output_ids").shape == (3, 1, 12)
    rows = {n: row[0][: len(expected[n])].tolist() for n, row in enumerate(answer.as_numpy("output_ids"))}
    assert rows == expected and (answer.as_numpy("output_ids")[1, 0, 5:] == -1).all()


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_texts(wire: RawStream, second_server: ServerProcess, model: str) -> None:
    one = wire.ask(text_inputs(6), model=model).text
    both = batch(text_inputs(6), text_inputs(9))
    answer = wire.ask(both, model=model)
    texts = {int(response["batch_index"][0, 0]): response["text_output"][0].decode() for response in answer.responses}
    assert texts[0] == one and texts[1].startswith(one) and len(texts) == 2
    gathered = infer(second_server, model, both)
    assert gathered.as_numpy("text_output").tolist() == [texts[0].encode(), texts[1].encode()]


def test_a_prompt_that_cannot_be_served_fails_alone(wire: RawStream) -> None:
    wrong = token_inputs(4)
    wrong["runtime_top_p"] = np.array([[7.0]], np.float32)
    answer = wire.ask(batch(token_inputs(4), wrong, token_inputs(4)), model="tensorrt_llm")
    assert "prompt 1: top_p must be" in answer.error
    wire.collect(answer, finals=2)  # RawStream counts each error as final
    assert tokens_by_prompt(answer) == {0: IDS + TOKENS[:4], 2: IDS + TOKENS[:4]}


def test_too_many_prompts_are_refused_in_a_sentence(wire: RawStream) -> None:
    many = batch(*[token_inputs(1) for _ in range(MAX_PROMPTS + 1)])
    assert f"batch-size must be <= {MAX_PROMPTS} for 'tensorrt_llm'" in wire.ask(many, model="tensorrt_llm").error


def test_prompts_of_different_numbers_are_refused(wire: RawStream) -> None:
    inputs = batch(token_inputs(1), token_inputs(1)) | {"input_lengths": np.array([[3]], np.int32)}
    assert "batch size" in wire.ask(inputs, model="tensorrt_llm").error


def test_most_prompts_at_once(second_server: ServerProcess) -> None:
    many = batch(*[token_inputs(3) for _ in range(MAX_PROMPTS)])
    answer = infer(second_server, "tensorrt_llm", many)
    assert answer.as_numpy("output_ids").tolist() == [[IDS + TOKENS[:3]]] * MAX_PROMPTS


def test_a_client_that_leaves_takes_all_its_prompts_along(server: ServerProcess) -> None:
    long = batch(*[token_inputs(2000, streaming=np.array([[True]])) for _ in range(3)])
    with RawStream(server.grpc_url) as leaving:
        running = leaving.send(long, request_id="leaves", model="tensorrt_llm")
        while len({int(response["batch_index"][0, 0]) for response in running.responses}) < 3:
            leaving.take()
    with grpcclient.InferenceServerClient(server.grpc_url), RawStream(server.grpc_url) as wire:
        while "already in progress" in wire.ask(token_inputs(1), request_id="leaves", model="tensorrt_llm").error:
            pass
