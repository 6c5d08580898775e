"""`tensorrt_llm`, `ensemble` and `tensorrt_llm_bls` as tensorrtllm_backend's clients use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_stream import Answer, RawStream
from server_process import ServerProcess

from inflight_client import Client

from .conftest import GOLDEN, number, text

IDS, TOKENS = GOLDEN["prompt_ids"], GOLDEN["token_ids"]


def token_inputs(num_tokens: int, ids: list[int] = IDS, **more: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of NVIDIA's client for token ids, each with a batch dimension."""
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": number(len(ids), np.int32, 1, 1),
        "request_output_len": number(num_tokens, np.int32, 1, 1),
        "beam_width": number(1, np.int32, 1, 1),
        "temperature": number(1.0, np.float32, 1, 1),
        "runtime_top_k": number(0, np.int32, 1, 1),
        "runtime_top_p": number(0.0, np.float32, 1, 1),
        "streaming": number(False, bool, 1, 1),
        **more,
    }


def text_inputs(num_tokens: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of NVIDIA's client for text."""
    return {
        "text_input": text(GOLDEN["prompt"], 1, 1),
        "max_tokens": number(num_tokens, np.int32, 1, 1),
        "bad_words": text("", 1, 1),
        "stop_words": text("", 1, 1),
        "stream": number(False, bool, 1, 1),
        "beam_width": number(1, np.int32, 1, 1),
        **more,
    }


def flag(value: bool = True) -> np.ndarray:
    return number(value, bool, 1, 1)


def ids_of(answer: Answer, beam: int = 0) -> list[int]:
    assert all(response["output_ids"].ndim == 3 for response in answer.responses)
    found = []
    for response in answer.responses:
        length = int(response["sequence_length"][0, beam])
        found += response["output_ids"][0, beam, :length].tolist()
    return found


def test_one_response_repeats_the_prompt(wire: RawStream) -> None:
    answer = wire.ask(token_inputs(12), model="tensorrt_llm")
    assert ids_of(answer) == IDS + TOKENS[:12] and len(answer.responses) == 1
    assert set(answer.responses[0]) == {"output_ids", "sequence_length"}
    excluded = wire.ask(token_inputs(12, exclude_input_in_output=flag()), model="tensorrt_llm")
    assert ids_of(excluded) == TOKENS[:12]


def test_a_stream_holds_only_new_tokens(wire: RawStream) -> None:
    answer = wire.ask_in_parts(token_inputs(12, streaming=flag()), model="tensorrt_llm")
    assert ids_of(answer) == TOKENS[:12] and answer.num_finals == 1


def test_padding_is_cut_off(wire: RawStream) -> None:
    padded = token_inputs(6, [*IDS, 0, 0], streaming=flag())
    padded["input_lengths"] = number(len(IDS), np.int32, 1, 1)
    assert ids_of(wire.ask(padded, model="tensorrt_llm")) == TOKENS[:6]


def test_outputs_that_flags_ask_for(wire: RawStream) -> None:
    names = ("log_probs", "context_logits", "generation_logits", "perf_metrics", "num_input_tokens")
    more = {f"return_{name}": flag() for name in names}
    (response,) = wire.ask(token_inputs(4, **more), model="tensorrt_llm").responses
    vocabulary = response["context_logits"].shape[-1]
    assert response["output_log_probs"].shape == (1, 1, 4) and response["cum_log_probs"].shape == (1, 1)
    assert response["context_logits"].shape == (1, len(IDS), vocabulary)
    assert response["generation_logits"].shape == (1, 1, 4, vocabulary)
    assert response["num_input_tokens"].tolist() == [[len(IDS)]]
    assert response["arrival_time_ns"][0, 0] <= response["last_token_time_ns"][0, 0]
    assert response["kv_cache_alloc_total_blocks"].shape == (1, 1)


def test_a_stream_repeats_log_probs_and_ends_with_the_prompts_logits(wire: RawStream) -> None:
    """NVIDIA's client keeps those of the last response."""
    flags = {"streaming": flag(), "return_log_probs": flag(), "return_context_logits": flag()}
    first, *_, last = wire.ask_in_parts(token_inputs(6, **flags), model="tensorrt_llm").responses
    assert last["output_log_probs"].shape == (1, 1, 6)
    assert last["output_log_probs"].sum() == pytest.approx(last["cum_log_probs"][0, 0], rel=1e-4)
    assert (last["context_logits"] == first["context_logits"]).all()


def test_what_clients_send_without_meaning_it(wire: RawStream) -> None:
    """A padding token of another vocabulary, and no extra id for any token."""
    more = {"pad_id": number(50256, np.int32, 1, 1), "prompt_table_extra_ids": np.zeros((1, len(IDS)), np.uint64)}
    assert ids_of(wire.ask(token_inputs(4, streaming=flag(), **more), model="tensorrt_llm")) == TOKENS[:4]


def test_beams_are_in_one_response(wire: RawStream, server: ServerProcess) -> None:
    with Client(server.grpc_url) as client:
        ranked = client.generate(IDS, max_tokens=8, beam_width=3, num_return_sequences=3, end_id=-1).sequences
    inputs = token_inputs(8, exclude_input_in_output=flag(), return_log_probs=flag())
    inputs["beam_width"] = number(3, np.int32, 1, 1)
    answer = wire.ask(inputs, model="tensorrt_llm")
    (response,) = answer.responses
    assert response["output_ids"].shape == (1, 3, 8) and response["cum_log_probs"].shape == (1, 3)
    assert [ids_of(answer, beam) for beam in range(3)] == [list(each.token_ids) for each in ranked]


def test_sequences_have_responses_of_their_own(wire: RawStream) -> None:
    more = {"num_return_sequences": number(2, np.int32, 1, 1), "seed": number(3, np.uint64, 1, 1)}
    inputs = token_inputs(6, exclude_input_in_output=flag(), **more)
    inputs["runtime_top_k"] = number(20, np.int32, 1, 1)
    answer = wire.ask(inputs, model="tensorrt_llm")
    assert [int(response["sequence_index"][0, 0]) for response in answer.responses] == [0, 1]


def test_stop_words_as_tokens(wire: RawStream) -> None:
    words = np.array([[[TOKENS[3], TOKENS[4]], [2, -1]]], np.int32)
    answer = wire.ask(token_inputs(20, streaming=flag(), stop_words_list=words), model="tensorrt_llm")
    assert len(ids_of(answer)) <= 5


def stop_inputs() -> dict[str, np.ndarray]:
    return {
        "input_ids": np.zeros((1, 0), np.int32),
        "input_lengths": number(0, np.int32, 1, 1),
        "request_output_len": number(0, np.int32, 1, 1),
        "stop": flag(),
    }


def test_a_stop_ends_the_request_of_its_id_and_is_answered_with_nothing(server: ServerProcess) -> None:
    with RawStream(server.grpc_url) as wire, RawStream(server.grpc_url) as other:
        running = wire.send(token_inputs(2000, streaming=flag()), request_id="17", model="tensorrt_llm")
        while not running.responses:
            wire.take()
        stop = other.ask(stop_inputs(), request_id="17", model="tensorrt_llm")
        assert not stop.error and not stop.responses
        wire.collect(running)
        assert not running.error and 0 < len(ids_of(running)) < 2000
        unknown = other.ask(stop_inputs(), request_id="4711", model="tensorrt_llm")
        assert not unknown.error and not unknown.responses


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"encoder_output_lengths": number(3, np.int32, 1, 1)}, "serves decoders only"),
        ({"draft_acceptance_threshold": number(0.5, np.float32, 1, 1)}, "need draft_input_ids"),
        ({"input_lengths": number(99, np.int32, 1, 1)}, "input_lengths is 99"),
        ({"min_length": number(2, np.int32, 1, 1), "min_tokens": number(3, np.int32, 1, 1)}, "set the same option"),
    ],
)
def test_what_is_refused_is_said_in_a_sentence(wire: RawStream, more: dict[str, np.ndarray], words: str) -> None:
    assert words in wire.ask(token_inputs(4, **more), model="tensorrt_llm").error


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models(wire: RawStream, server: ServerProcess, model: str) -> None:
    with Client(server.grpc_url) as client:
        expected = client.generate(GOLDEN["prompt"], max_tokens=48).text
    whole = wire.ask(text_inputs(48), model=model)
    (response,) = whole.responses
    assert response["text_output"].shape == (1,) and whole.text == GOLDEN["prompt"] + expected
    streamed = wire.ask_in_parts(
        text_inputs(48, stream=flag(), return_log_probs=flag()), model=model, parameters={"Streaming": True}
    )
    assert streamed.text == expected
    assert all(response["cum_log_probs"].shape == (1, 1) for response in streamed.responses)


def test_words_and_sampling_of_text_models(wire: RawStream, server: ServerProcess) -> None:
    options: dict[str, Any] = {"top_k": 30, "temperature": 0.8, "seed": 5, "stop_words": ["."], "min_tokens": 2}
    with Client(server.grpc_url) as client:
        expected = client.generate(GOLDEN["prompt"], max_tokens=30, **options).text
    more = {
        "top_k": number(30, np.int32, 1, 1),
        "temperature": number(0.8, np.float32, 1, 1),
        "random_seed": number(5, np.uint64, 1, 1),
        "stop_words": text(".", 1, 1),
        "min_length": number(2, np.int32, 1, 1),
    }
    answer = wire.ask(text_inputs(30, exclude_input_in_output=flag(), **more), model="ensemble")
    assert answer.text == expected


def test_temperature_alone_stays_greedy(wire: RawStream) -> None:
    inputs = token_inputs(8, streaming=flag(), seed=number(1, np.uint64, 1, 1))
    inputs["temperature"] = number(5.0, np.float32, 1, 1)
    assert ids_of(wire.ask(inputs, model="tensorrt_llm")) == TOKENS[:8]
