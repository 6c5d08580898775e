"""Biases, repeated n-grams, a decaying top_p, and the tensors that a request may ask for, through a real server.

pytest ci/L0_llm/test_sampling_and_tensors.py
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raw_stream import Answer, RawStream
from real_engine import CHECKPOINT
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

GOLDENS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden/default_model.json").read_text("utf-8"))
PROMPT: list[int] = next(golden for golden in GOLDENS if golden["name"] == "chat")["prompt_ids"]
NUM_TOKENS = 12
OK: dict[str, Any] = {
    "input_ids": np.array(PROMPT, np.int32),
    "max_tokens": NUM_TOKENS,
    "end_id": -1,
    "exclude_input_in_output": True,
}
EVERYTHING = {
    "return_log_probs": True,
    "num_log_probs": 4,
    "return_prompt_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
    "additional_outputs": ["hidden_states", "hidden_states.0"],
    "gather_context": True,
}


@pytest.fixture
def stream(server: ServerProcess) -> Iterator[RawStream]:
    with RawStream(server.grpc_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def generate(model: Any, **options: Any) -> list[int]:
    """Greedy, by transformers."""
    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, **options
        )
    tokens: list[int] = generated[0, len(PROMPT) :].tolist()
    return tokens


def arrays(answer: Answer, name: str) -> np.ndarray:
    """All of one output, the parts of a stream one behind the other."""
    parts = [response[name] for response in answer.responses if name in response]
    return np.concatenate(parts, axis=1 if parts[0].ndim == 3 else 0)


def test_tokens_are_those_of_transformers_processors(stream: RawStream, model: Any) -> None:
    free = generate(model)
    sparse = {free[0]: -40.0, free[1]: 25.0, 9: 22.0}
    dense = np.zeros(model.config.vocab_size, np.float32)
    dense[list(sparse)] = list(sparse.values())
    wanted = generate(model, sequence_bias={(token,): bias for token, bias in sparse.items()}, no_repeat_ngram_size=2)
    assert wanted != free
    by_id = {
        **OK,
        "logit_bias_ids": list(sparse),
        "logit_bias_values": np.array(list(sparse.values()), np.float32),
        "no_repeat_ngram_size": 2,
    }
    by_vocabulary = {**OK, "embedding_bias": dense, "no_repeat_ngram_size": 2}
    answers = [stream.send(each) for each in (by_id, by_vocabulary, OK)]
    stream.collect(*answers)
    assert [answer.token_ids for answer in answers] == [wanted, wanted, free]


def test_a_decaying_top_p_ends_as_greedy(stream: RawStream, model: Any) -> None:
    """With a minimum that holds one token, every draw behind the first is the likeliest."""
    decaying = {"temperature": 1.0, "seed": np.array([7], np.uint64), "top_p_decay": 1e-6, "top_p_min": 1e-6}
    answer = stream.ask({**OK, **decaying, "top_p": 0.0001})
    assert answer.token_ids == generate(model)


@pytest.mark.parametrize("streams", [False, True])
def test_tensors_are_those_of_transformers(stream: RawStream, model: Any, streams: bool) -> None:
    asked = stream.send({**OK, **EVERYTHING, "stream": streams})
    silent = stream.send({**OK, "stream": streams})
    stream.collect(asked, silent)
    assert asked.token_ids == silent.token_ids == generate(model)
    tokens = torch.tensor([PROMPT + asked.token_ids])
    with torch.inference_mode():
        found = model(tokens, output_hidden_states=True)
    logits = found.logits[0, :-1]
    hidden = torch.cat([found.hidden_states[-1], found.hidden_states[1]], dim=-1)[0, :-1]
    log_probs, first = logits.log_softmax(-1), len(PROMPT) - 1
    of_prompt = log_probs[:first].gather(1, tokens[0, 1 : first + 1, None])[:, 0]
    close = {"rtol": 0, "atol": 2e-3}
    np.testing.assert_allclose(arrays(asked, "context_logits"), logits[: first + 1], **close)
    np.testing.assert_allclose(arrays(asked, "generation_logits")[0], logits[first:], **close)
    np.testing.assert_allclose(arrays(asked, "context_hidden_states"), hidden[: first + 1], **close)
    np.testing.assert_allclose(arrays(asked, "hidden_states")[0], hidden[first:], **close)
    np.testing.assert_allclose(arrays(asked, "prompt_log_probs"), of_prompt, **close)
    np.testing.assert_allclose(arrays(asked, "prompt_top_log_probs"), log_probs[:first].topk(4).values, **close)
    np.testing.assert_allclose(arrays(asked, "top_log_probs")[0], log_probs[first:].topk(4).values, **close)
    assert arrays(asked, "top_token_ids")[0, :, 0].tolist() == asked.token_ids
    of_the_prompt = [response for response in asked.responses if "context_logits" in response]
    assert of_the_prompt == asked.responses[:1]
    assert not set(silent.responses[0]) & {"context_logits", "generation_logits", "top_log_probs", "hidden_states"}


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            {"additional_outputs": ["attention"]},
            "additional_outputs names 'attention', which this model does not offer",
        ),
        ({"embedding_bias": np.zeros(3, np.float32)}, "embedding_bias must hold one float32 for each of the"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(
    stream: RawStream, inputs: dict[str, Any], sentence: str
) -> None:
    assert sentence in stream.ask({**OK, **inputs}).error


def test_a_large_response_is_whole_over_grpc_and_http(server: ServerProcess, stream: RawStream) -> None:
    """Its final response is one of its own and empty, so that one that does not fit can still end in an error."""
    prompt = (PROMPT * 200)[:200]
    asked = {**OK, "input_ids": np.array(prompt, np.int32), "return_context_logits": True}
    logits = arrays(stream.ask(asked), "context_logits")
    assert logits.shape == (200, 2048) and logits.nbytes > 2**20
    body = {"input_ids": prompt, "max_tokens": 2, "return_context_logits": True, "exclude_input_in_output": True}
    request = urllib.request.Request(f"{server.http_url}/v2/models/llm/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=180) as response:
        answer = json.load(response)
    assert len(answer["output_ids"]) == 2 and len(answer["context_logits"]) == 200 * 2048
