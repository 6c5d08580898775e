"""`vllm_model` as vllm_backend's clients use it."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import numpy as np
import pytest
from raw_stream import Answer, RawStream
from server_metrics import read_metrics
from server_process import ServerProcess
from waiting import until

from inflight_client import Client

from .conftest import GOLDEN, text

PROMPT = GOLDEN["prompt"]


def inputs(prompt: str, parameters: dict[str, Any] | None, **flags: bool) -> dict[str, np.ndarray]:
    """The tensors of vllm_backend's client: prompt, stream, sampling parameters, flags, all of shape [1]."""
    made = {"text_input": text(prompt, 1)}
    made |= {name: np.array([flag]) for name, flag in flags.items()}
    if parameters is not None:
        made["sampling_parameters"] = text(json.dumps(parameters), 1)
    return made


def ask(
    wire: RawStream,
    said: dict[str, Any] | None,
    *,
    outputs: tuple[str, ...] = (),
    parameters: dict[str, Any] | None = None,
    **flags: bool,
) -> Answer:
    """`said`: the sampling parameters; None = no such tensor."""
    return wire.ask(inputs(PROMPT, said, **flags), model="vllm_model", outputs=outputs, parameters=parameters)


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> str:
    with Client(server.grpc_url) as client:
        return client.generate(PROMPT, max_tokens=24).text


def test_a_stream_holds_only_what_is_new(wire: RawStream, expected: str) -> None:
    said = {"temperature": "0", "top_p": "0.95", "max_tokens": "24"}
    answer = ask(wire, said, stream=True, exclude_input_in_output=True)
    assert answer.text == expected and answer.num_finals == 1 and not answer.error
    assert all(set(response) == {"text_output"} for response in answer.responses)
    assert all(response["text_output"].shape == (1,) for response in answer.responses)


def test_one_response_begins_with_the_prompt_unless_told_otherwise(wire: RawStream, expected: str) -> None:
    said = {"temperature": 0, "max_tokens": 24}
    assert ask(wire, said).text == PROMPT + expected
    assert ask(wire, said, stream=False, exclude_input_in_output=True).pieces == [expected]


def test_without_parameters_vllms_defaults_hold(wire: RawStream) -> None:
    answer = ask(wire, None, return_num_output_tokens=True, return_finish_reason=True, return_num_input_tokens=True)
    (response,) = answer.responses
    assert response["num_output_tokens"].tolist() == [16] and response["finish_reason"].tolist() == [b"length"]
    assert response["num_input_tokens"].tolist() == [len(GOLDEN["prompt_ids"])]
    assert response["num_input_tokens"].dtype == response["num_output_tokens"].dtype == np.uint32


def test_request_parameters_instead_of_the_tensor(server: ServerProcess, wire: RawStream, expected: str) -> None:
    parameters = {"max_tokens": 24, "temperature": "0"}
    answer = ask(wire, None, exclude_input_in_output=True, parameters=parameters)
    assert answer.text == expected
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "parameters": {"temperature": 0, "max_tokens": 24}}
    assert generate(server, body)["text_output"] == expected


def generate(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{server.http_url}/v2/models/vllm_model/generate"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=180) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_every_further_output(wire: RawStream) -> None:
    flags = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    said = {"temperature": 0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True}
    answer = ask(wire, said, stream=True, **{f"return_{flag}": True for flag in flags})
    assert all(set(response) == {"text_output", *flags} for response in answer.responses)
    reasons = [response["finish_reason"][0] for response in answer.responses]
    assert reasons == [b"None"] * (len(reasons) - 1) + [b"length"]
    assert sum(int(response["num_output_tokens"][0]) for response in answer.responses) == 12
    entries = [entry for response in answer.responses for entry in json.loads(response["logprobs"][0])]
    assert [int(next(iter(entry))) for entry in entries] == GOLDEN["token_ids"][:12], "greedy: the likeliest first"
    total = sum(next(iter(entry.values()))["logprob"] for entry in entries)
    assert answer.responses[-1]["cumulative_logprob"][0] == pytest.approx(total, rel=1e-4)
    assert "".join(next(iter(entry.values()))["decoded_token"] for entry in entries).strip() in answer.text


def test_log_probs_that_were_not_asked_of_the_sampling_are_null(wire: RawStream) -> None:
    answer = ask(wire, {"max_tokens": 2}, return_logprobs=True)
    assert answer.responses[0]["logprobs"].tolist() == [b"null"]


def test_all_sequences_are_in_each_response(wire: RawStream) -> None:
    said = {"n": 3, "seed": 7, "max_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    whole = ask(wire, said, exclude_input_in_output=True, return_num_output_tokens=True)
    (response,) = whole.responses
    assert response["num_output_tokens"].tolist() == [8, 8, 8] and len(set(response["text_output"])) > 1
    pieces = ask(wire, said, stream=True)
    assert all(response["text_output"].shape == (3,) for response in pieces.responses)
    joined = [b"".join(response["text_output"][row] for response in pieces.responses) for row in range(3)]
    assert joined == response["text_output"].tolist()


def test_an_output_that_is_named_needs_no_flag(wire: RawStream) -> None:
    answer = ask(wire, {"max_tokens": 2}, outputs=("text_output", "finish_reason"))
    assert set(answer.responses[0]) == {"text_output", "finish_reason"}


@pytest.mark.parametrize(
    ("said", "flags", "words"),
    [
        ({}, {"stream": True, "exclude_input_in_output": False}, "Error generating stream: When streaming, `exclude_"),
        ({"best_of": 3}, {}, "best_of is not supported"),
        ({"max_tokenz": 3}, {}, "did you mean max_tokens"),
        ({"lora_name": "nobody"}, {}, "nobody"),
        ({"temperature": -1}, {}, "temperature must be"),
    ],
)
def test_errors_are_sentences(wire: RawStream, said: dict, flags: dict[str, bool], words: str) -> None:
    assert words in ask(wire, said, **flags).error


def test_an_adapter_by_name(wire: RawStream, server: ServerProcess) -> None:
    with Client(server.grpc_url) as client:
        expected = client.generate(PROMPT, max_tokens=12, lora_name="pirate").text
    said = {"lora_name": "pirate", "temperature": 0, "max_tokens": 12}
    assert ask(wire, said, exclude_input_in_output=True).text == expected


def test_structured_outputs_follow_their_choice(wire: RawStream) -> None:
    said = {"structured_outputs": json.dumps({"choice": ["red", "blue"]}), "temperature": 0, "max_tokens": 16}
    assert ask(wire, said, exclude_input_in_output=True).text in ("red", "blue")


def test_requests_are_counted_under_vllms_names(wire: RawStream, server: ServerProcess) -> None:
    before = counted(server)
    ask(wire, {"max_tokens": 5, "ignore_eos": True, "n": 2})
    expected = {
        "prompt_tokens_total": len(GOLDEN["prompt_ids"]),
        "generation_tokens_total": 10,
        "time_to_first_token_seconds_count": 1,
        "time_per_output_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
        "request_prompt_tokens_sum": len(GOLDEN["prompt_ids"]),
        "request_generation_tokens_sum": 10,
        "request_params_n_sum": 2,
    }

    def is_counted() -> bool:
        """Of the requests before this one some may be counted only now."""
        now = counted(server)
        return all(now.get(name, 0.0) - before.get(name, 0.0) >= value for name, value in expected.items())

    until(is_counted, "the request is counted")


def counted(server: ServerProcess) -> dict[str, float]:
    """vLLM's series without those of buckets, by name."""
    lines = re.findall(r'^vllm:(\w+)\{[^}]*model="vllm_model"[^}]*\} (\S+)$', read_metrics(server), re.MULTILINE)
    return {name: float(value) for name, value in lines if not name.endswith("_bucket")}


def test_what_a_schema_that_is_not_strict_leaves_out_is_named(wire: RawStream) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "not": {"format": "ipv4"},
    }
    guide = {"json": schema, "disable_any_whitespace": True, "backend": "guidance", "strict": False}
    said = {"structured_outputs": guide, "max_tokens": 40, "temperature": 0}
    answer = ask(wire, said, exclude_input_in_output=True)
    assert answer.text in ('{"ok":true}', '{"ok":false}')
    assert answer.responses[-1]["guided_decoding_not_enforced"].tolist() == [b"#/not format"]
