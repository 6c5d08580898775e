"""`preprocessing` and `postprocessing` around `tensorrt_llm`, in three calls and as an ensemble of tritonserver."""

from __future__ import annotations

import numpy as np
from server_process import ServerProcess

from .conftest import GOLDEN
from .ensemble import OF_STEPS, TO_POSTPROCESSING, TO_PREPROCESSING, TO_TENSORRT_LLM
from .test_tensorrt_llm import text_inputs
from .test_unary_tensorrt_llm import infer


def two_prompts() -> dict[str, np.ndarray]:
    one = {name: value for name, value in text_inputs(8).items() if name not in ("beam_width", "stream")}
    both = {name: np.concatenate([value, value]) for name, value in one.items()}
    return both | {"text_input": np.array([[GOLDEN["prompt"].encode()], [b"Once"]], object)}


def test_three_calls_are_one_of_ensemble(second_server: ServerProcess) -> None:
    asked = two_prompts()
    tokens = infer(second_server, "preprocessing", {name: asked[each] for name, each in TO_PREPROCESSING.items()})
    assert tokens.as_numpy("INPUT_ID")[0].tolist() == GOLDEN["prompt_ids"]
    prompts = {name: tokens.as_numpy(each) for name, each in TO_TENSORRT_LLM.items()}
    answer = infer(second_server, "tensorrt_llm", prompts)
    generated = {name: answer.as_numpy(each) for name, each in TO_POSTPROCESSING.items()}
    texts = infer(second_server, "postprocessing", generated).as_numpy("OUTPUT")
    assert texts.tolist() == infer(second_server, "ensemble", asked).as_numpy("text_output").tolist()


def test_they_answer_once_where_the_others_stream(server: ServerProcess) -> None:
    inputs = {"QUERY": np.array([[b"Once"]], object), "REQUEST_OUTPUT_LEN": np.array([[3]], np.int32)}
    assert infer(server, "preprocessing", inputs).as_numpy("REQUEST_OUTPUT_LEN").tolist() == [[3]]


def test_an_ensemble_of_the_three_answers_as_ensemble_does(second_server: ServerProcess) -> None:
    found = infer(second_server, OF_STEPS, two_prompts()).as_numpy("text_output")
    assert found.tolist() == infer(second_server, "ensemble", two_prompts()).as_numpy("text_output").tolist()


def test_a_client_that_drafts_itself_gets_the_same_tokens(second_server: ServerProcess) -> None:
    """As NVIDIA's client for speculative decoding: what one call generates are the drafts of the next."""
    inputs = {"QUERY": np.array([[GOLDEN["prompt"].encode()]], object), "REQUEST_OUTPUT_LEN": np.array([[5]], np.int32)}
    prompt = infer(second_server, "preprocessing", inputs)
    asked = {name: prompt.as_numpy(each) for name, each in TO_TENSORRT_LLM.items()}
    drafts = infer(second_server, "tensorrt_llm", asked | {"request_output_len": np.array([[4]], np.int32)})
    ids = drafts.as_numpy("output_ids")[0, :, len(GOLDEN["prompt_ids"]) :]
    target = infer(second_server, "tensorrt_llm", asked | {"draft_input_ids": ids})
    assert target.as_numpy("output_ids")[0, 0].tolist() == GOLDEN["prompt_ids"] + GOLDEN["token_ids"][:5]
